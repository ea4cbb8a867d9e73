"""The demo vision model: pictures with known answers, and the script that trains a model to read them."""
