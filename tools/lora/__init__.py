"""Training of LoRA adapters for tests."""
