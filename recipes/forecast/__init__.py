"""Forecasts of updates, without a cluster."""
