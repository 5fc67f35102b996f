"""The input file: schema, reading, normalised form, reference."""
