"""What commands have in common: how options are read, tables, bars and figures. Knows no model."""
