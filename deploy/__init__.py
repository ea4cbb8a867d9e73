"""What stands around daemons. `ray/` alone is a package; the rest are files for other programs."""
