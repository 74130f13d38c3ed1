"""`rlexp.verify`: a configuration's first steps, held to a plain reference that shares no code with them."""
