"""What commands have in common: how options are read, tables and bars. Knows no model."""
