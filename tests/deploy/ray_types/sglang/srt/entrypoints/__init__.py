"""A stand-in: only the names of the types that Ray Serve LLM takes from SGLang."""
