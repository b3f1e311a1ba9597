"""Who is in a run: the coordinator, its records and rules, and sessions as a site asks for them."""
