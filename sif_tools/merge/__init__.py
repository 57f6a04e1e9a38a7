"""Layers become one tree, and the tree becomes one tar stream, in two passes.

1. `index`: the headers of every layer, bottom to top, are applied to a tree of names, which in
   the end says for each path which entry of which layer has won.
2. `emit`: the layers are read again in the same order and the winners' bytes go out.

Only names are held in memory, never content, and nothing is unpacked. The stream's order is what
lets each layer be read straight through: first all directories (sorted, so parents come before
children), then each layer's winners as they come, then the hard links. Squashfs sorts its
directories itself, so this order decides only where the data lies, and it is a function of the
layers alone: the same image gives the same bytes.
"""
