"""Deployment files. `fleet/` and `ray/` are packages; everything else configures other programs.

Owns: the fleet simulator, weft on Ray, and files for systemd, Kubernetes, Envoy, Prometheus and Grafana.
May import: every folder but `tools/` and `kernels/`.
Never: is imported by another folder; the command line loads `weft fleet` by name.
"""
