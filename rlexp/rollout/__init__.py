"""From prompts to experience: sampling, rewards, scoring, and who holds what of it."""
