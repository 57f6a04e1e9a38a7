"""Many thousands of images into a store: `sif-tools convert --batch LIST`.

``jobs``     the list of images, and the journal of what became of them
``workers``  processes that do the work, and may die at it
``run``      resolve all, plan what they share, build that, then build each

Nothing here is needed for correctness: the store's protocol sees to that, also with several batches
over the same list on several nodes. This only orders the work, and tells how far it is.
"""
