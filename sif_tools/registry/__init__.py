"""Read images from registries (OCI distribution specification, and Docker's before it).

    reference      what a name says: host, repository, tag, digest
    credentials    who we are: auth.json, Docker's config, credential helpers
    challenge      a 401's answer: Basic, or a token from the realm it names
    transport      one request that succeeds or says why: redirects, retries, patience
    spool          a blob on disk while it arrives, read by whoever needs it
    images         manifests and blobs of one repository, from its mirrors or itself

Not for writing to registries, nor for what is inside a manifest (`oci`).
"""
