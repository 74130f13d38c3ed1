"""From prompts to experience: sampling, rewards, scoring, and which rank holds which sample."""
