"""Stand-in: the node packs want it to be imported before them."""
