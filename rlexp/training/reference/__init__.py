"""What the policy is compared with: a model, the policy without its adapter, or what was computed before training."""
