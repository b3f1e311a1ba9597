"""A relay for sites that can only dial out, and a site's side of it."""
