"""`weft bench offline`, `multiround`, `agent`, `scheduler` and `server`: the engine and the API process, timed."""
