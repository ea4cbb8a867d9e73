"""How many tokens an image takes, and how it is resized: a rule for each family of vision-language models.

Owns: image rules, their plans.
May import: nothing but the errors.
Never: torch or Pillow, pixels, files of clients.
"""
