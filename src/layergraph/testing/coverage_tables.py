def write_tables(out, rows):
    pass
