"""A federation as a Flower app: the same model, algorithm and settings on the server and on every site."""
