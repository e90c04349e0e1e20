"""``python -m aserve bench lab``: the laboratory of launch policies.

``experiments`` are made of runs (``running``: the whole engine under requests that arrive at given times, on a virtual
device or a real one); what they found is ``findings``, written by ``report`` as tables, ``plots`` and timelines.
``study`` holds the figures that experiments 1 to 6 are held against, ``shapes`` the costs of the other ones.
"""
