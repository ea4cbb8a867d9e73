"""Deployment files. `fleet/` and `ray/` are packages; everything else configures other programs."""
