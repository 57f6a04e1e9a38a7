/* Preloaded into squashfuse_ll: has it tell the kernel that an image never changes.
 *
 * squashfuse lets the kernel keep names, attributes and pages for ever, but not where symbolic links
 * lead, which names there are not, what directories hold, and that a file needs no opening. So each
 * start of a program in a warm sandbox was a dozen requests to it. This answers FUSE's questions so
 * that the kernel asks them once (Documentation/filesystems/fuse, <linux/fuse.h>):
 *
 *   FUSE_INIT      with CACHE_SYMLINKS
 *   FUSE_LOOKUP    of a name that is not there: an entry with inode 0, which may be kept
 *   FUSE_OPEN      ENOSYS: no file is opened or released any more, and its pages are kept
 *   FUSE_OPENDIR   the same, and what is in a directory is kept
 *   FUSE_GETXATTR  ENOSYS where the image has no attributes at all (the environment says so)
 *
 * Reads then come without what squashfuse made at the open. It is made here at the first read, by
 * squashfuse's own operation, whose reply is caught, and kept in a small table.
 *
 * What this is in: a program that parses bytes nobody vouches for, and so has no rights. In one into
 * which libfuse is linked statically nothing of this is ever called; so nothing of libfuse is needed
 * to load it.
 */
#define FUSE_USE_VERSION 35
#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Of each kind; a power of two. A file that shares its place with another is opened anew in turn. */
#define PLACES   1024
#define FOR_EVER 1e9 /* seconds */

struct handle {
    fuse_ino_t ino; /* 0: none */
    uint64_t fh;
};

struct table {
    pthread_rwlock_t lock;
    struct handle places[PLACES];
};

typedef void open_op(fuse_req_t, fuse_ino_t, struct fuse_file_info *);
typedef void read_op(fuse_req_t, fuse_ino_t, size_t, off_t, struct fuse_file_info *);

static struct fuse_lowlevel_ops served; /* squashfuse's own */
static struct table files = {.lock = PTHREAD_RWLOCK_INITIALIZER};
static struct table directories = {.lock = PTHREAD_RWLOCK_INITIALIZER};
static bool may_refuse_open, may_refuse_opendir;

/* What this thread has squashfuse do, and what came of it. */
static _Thread_local enum { ANSWER, LOOKUP, CAUGHT } doing;
static _Thread_local int caught_error;

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort(); /* squashfuse could not have been started without */
    return found;
}

int fuse_reply_err(fuse_req_t req, int err) {
    if (doing == CAUGHT) {
        caught_error = err;
        return 0;
    }
    if (doing == LOOKUP && err == ENOENT) {
        struct fuse_entry_param none = {.ino = 0, .entry_timeout = FOR_EVER};
        static int (*reply_entry)(fuse_req_t, const struct fuse_entry_param *);
        if (!reply_entry)
            *(void **)&reply_entry = next("fuse_reply_entry");
        return reply_entry(req, &none);
    }
    static int (*real)(fuse_req_t, int);
    if (!real)
        *(void **)&real = next("fuse_reply_err");
    return real(req, err);
}

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi) {
    if (doing == CAUGHT) {
        caught_error = 0;
        return 0;
    }
    static int (*real)(fuse_req_t, const struct fuse_file_info *);
    if (!real)
        *(void **)&real = next("fuse_reply_open");
    return real(req, fi);
}

/* An operation whose reply is not the kernel's; its error. */
static int caught(open_op *op, fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    doing = CAUGHT;
    caught_error = EIO;
    op(req, ino, fi);
    doing = ANSWER;
    return caught_error;
}

static void read_from(struct table *table, open_op *open, open_op *release, read_op *read,
                      fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset) {
    struct handle *place = &table->places[ino & (PLACES - 1)];
    struct fuse_file_info fi = {0};
    pthread_rwlock_rdlock(&table->lock);
    while (place->ino != ino) {
        pthread_rwlock_unlock(&table->lock);
        pthread_rwlock_wrlock(&table->lock);
        if (place->ino != ino) {
            if (place->ino) {
                struct fuse_file_info old = {.fh = place->fh};
                caught(release, req, place->ino, &old);
                place->ino = 0;
            }
            int error = caught(open, req, ino, &fi);
            if (error) {
                pthread_rwlock_unlock(&table->lock);
                fuse_reply_err(req, error);
                return;
            }
            *place = (struct handle){.ino = ino, .fh = fi.fh};
        }
        /* Another may take the place meanwhile. */
        pthread_rwlock_unlock(&table->lock);
        pthread_rwlock_rdlock(&table->lock);
    }
    fi.fh = place->fh;
    read(req, ino, size, offset, &fi);
    pthread_rwlock_unlock(&table->lock);
}

static void on_init(void *userdata, struct fuse_conn_info *connection) {
    if (served.init)
        served.init(userdata, connection);
    connection->want |= connection->capable & FUSE_CAP_CACHE_SYMLINKS;
    may_refuse_open = connection->capable & FUSE_CAP_NO_OPEN_SUPPORT;
    may_refuse_opendir = connection->capable & FUSE_CAP_NO_OPENDIR_SUPPORT;
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    doing = LOOKUP;
    served.lookup(req, parent, name);
    doing = ANSWER;
}

static void on_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    if (may_refuse_open)
        fuse_reply_err(req, ENOSYS);
    else
        served.open(req, ino, fi);
}

static void on_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    if (may_refuse_opendir)
        fuse_reply_err(req, ENOSYS);
    else
        served.opendir(req, ino, fi);
}

static void on_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *fi) {
    if (may_refuse_open)
        read_from(&files, served.open, served.release, served.read, req, ino, size, offset);
    else
        served.read(req, ino, size, offset, fi);
}

static void on_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                       struct fuse_file_info *fi) {
    if (may_refuse_opendir)
        read_from(&directories, served.opendir, served.releasedir, served.readdir, req, ino, size,
                  offset);
    else
        served.readdir(req, ino, size, offset, fi);
}

struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op,
                                      size_t op_size, void *userdata) {
    struct fuse_session *(*real)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t,
                                 void *);
    *(void **)&real = next("fuse_session_new");
    memcpy(&served, op, op_size < sizeof served ? op_size : sizeof served);
    struct fuse_lowlevel_ops ops = served;
    ops.init = on_init;
    if (served.lookup)
        ops.lookup = on_lookup;
    if (served.open && served.read && served.release) {
        ops.open = on_open;
        ops.read = on_read;
    }
    if (served.opendir && served.readdir && served.releasedir) {
        ops.opendir = on_opendir;
        ops.readdir = on_readdir;
    }
    if (getenv("SANDBOXD_NO_XATTRS"))
        ops.getxattr = NULL, ops.listxattr = NULL;
    return real(args, &ops, sizeof ops, userdata);
}
