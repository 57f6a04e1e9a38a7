"""Where images come from. One shape (`Source`), one backend a module, one table of schemes.

    docker://HOST/NAME:TAG|@DIGEST   registry          blobs over HTTP, spooled while they are read
    oci:DIR[:TAG]                    oci_layout        a layout directory
    oci-archive:FILE[:TAG]           oci_layout        a layout in a tar
    docker-archive:FILE[:NAME:TAG]   docker_archive    what `docker save` writes
    rootfs:DIR                       rootfs_directory  a root file system
    sif:FILE                         sif_file          a SIF, to be packed anew

A source gives layers that can be read twice; what it opened (connections, temporary files) is
freed by `close`. Not for what is made of the layers.
"""
