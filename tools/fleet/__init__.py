"""`weft bench iterations` and the shipped H200 profile: where the profiles of `weft fleet` come from."""
