"""L-GreCo's planning: what each setting of a layer costs and misses, and the best of them."""
