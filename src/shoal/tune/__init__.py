"""Many runs of one recipe: a space of settings, who proposes them, who stops those that lag behind."""
