"""A stand-in: the names of the types that Ray Serve LLM takes from SGLang, and nothing else of it."""
