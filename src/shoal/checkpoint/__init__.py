"""How state survives: written aside, committed by its manifest, verified when read, retained by policy."""
