"""The command line. `main` has the entry point; each command lives in the module of its name."""
