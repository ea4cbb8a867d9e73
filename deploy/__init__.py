"""What stands around daemons. `fleet/` and `ray/` are packages; the rest are files for other programs."""
