"""The task, the policy and the trainers that teach it."""
