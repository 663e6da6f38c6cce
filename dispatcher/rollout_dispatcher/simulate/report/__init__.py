"""What a run says: figures, tables, an HTML page."""
