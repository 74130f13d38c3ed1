"""Which tokens go where: what the sequences of a train batch share, their packs, and a rank's part of each."""
