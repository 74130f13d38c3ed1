"""Where rewards come from: rules, functions of the user's, reward models; alone or as a weighted sum.

Empty, since the processes that run a user's function come through here and import no torch.
"""
