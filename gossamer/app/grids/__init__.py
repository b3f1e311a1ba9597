"""Several runs beside each other: tables, grids, cells that keep results, and where they run."""
