"""A page that measures exported files in a phone's browser and shows what they see."""
