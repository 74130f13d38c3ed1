"""Start processes from a configuration. Imports no torch until a rank starts."""
