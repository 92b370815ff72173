"""The edge to Ray: actor classes, and the handles that the controller awaits."""
