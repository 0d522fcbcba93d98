def write_tables(out, rows):
    pass


__all__ = ["write_tables"]
