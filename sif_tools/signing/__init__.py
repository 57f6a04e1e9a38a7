"""Signatures of SIF files, in the forms that Apptainer writes and reads.

    integrity   what is signed: digests of the header, of descriptors and of objects, as JSON
    pgp         the JSON clearsigned, through `gpg`
    dsse        the JSON in a DSSE envelope, verified through `openssl`
    sign        add a signature of each group of objects
    verify      check them all, and whether every group has one

A signature is an object linked to the group that it covers. Its descriptor names the hash and, for
PGP, the primary key's fingerprint. What gives trust is the key, which the caller brings. Formats as
in apptainer/sif, pkg/integrity.
"""
