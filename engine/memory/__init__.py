"""KV pages: what one looks like, who has it, and in which tier.

Owns: page layout and pool, the prefix index, host slots, SSD extents, the copies between tiers.
May import: wire/ (statistics), model/ and what lies below them.
Never: runs a model; decides which request goes next; frees a page that a launched step may touch.
"""
