"""`rlexp.verify`: a configuration's first steps, compared with a plain reference that shares no code with them."""
