"""KV pages: their layout, their owners, and the tiers that hold them.

Owns: page layout and pool, the prefix index, host slots, SSD extents, copies between tiers.
May import: wire/ (statistics), model/ and what lies below them.
Never: runs a model; decides which request runs next; frees a page that a launched step may touch.
"""
