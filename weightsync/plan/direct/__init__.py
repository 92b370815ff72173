"""Plans of direct reads of trainers' memory."""
