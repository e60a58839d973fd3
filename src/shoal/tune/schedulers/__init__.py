"""Who stops trials that lag behind, or replaces them. Pure: from trials to decisions; the search acts on them."""
