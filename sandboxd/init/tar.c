/*
 * tar.c - a directory's content as a tar: ustar(5), with pax extended headers for what does not fit
 * it (names of more than 100 bytes or that are not ASCII, sizes of 8 GiB and more, times before 1970).
 *
 * In the order of the walk, a directory before what is in it. A file with several names is written
 * once, and named again by links (up to LINKS_MAX such files; further ones are written as often as
 * they are named). Sockets, devices and what is on other file systems are left out.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LINKS_MAX  65536 /* a power of two */
#define LINK_NAMES (16u << 20)

static uint64_t packed_bytes;

uint32_t tar_checksum(const struct tar_header *header, bool as_signed) {
    const char *bytes = (const char *)header;
    size_t first = offsetof(struct tar_header, checksum), last = first + sizeof header->checksum;
    int32_t sum = 0;
    for (size_t i = 0; i < sizeof *header; i++) {
        char c = i >= first && i < last ? ' ' : bytes[i];
        sum += as_signed ? (signed char)c : (unsigned char)c;
    }
    return (uint32_t)sum;
}

static void put_octal(char *field, size_t size, uint64_t value) {
    field[--size] = 0;
    while (size) {
        field[--size] = (char)('0' + (value & 7));
        value >>= 3;
    }
}

static int put_header(struct tar_header *header) {
    memcpy(header->magic, "ustar", 6);
    memcpy(header->version, "00", 2);
    put_octal(header->checksum, 7, tar_checksum(header, false));
    header->checksum[7] = ' ';
    return emit(header, sizeof *header);
}

static int put_padding(uint64_t size) {
    static const uint8_t zeros[TAR_BLOCK];
    size_t over = size % TAR_BLOCK;
    return over ? emit(zeros, TAR_BLOCK - over) : 0;
}

/* --- pax extended headers --------------------------------------------------------------------- */

static bool is_ascii(const char *text) {
    while (*text > 0)
        text++;
    return !*text;
}

/* As RFC 3629: no surrogates, nothing overlong, nothing above U+10FFFF. */
static bool is_utf8(const char *text) {
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        size_t more = *at < 0x80 ? 0 : *at >= 0xc2 && *at <= 0xdf ? 1 : *at >> 4 == 0xe ? 2 : 3;
        unsigned char low = 0x80, high = 0xbf;
        if ((*at >= 0x80 && *at < 0xc2) || *at > 0xf4)
            return false;
        if (*at == 0xe0)
            low = 0xa0;
        else if (*at == 0xed)
            high = 0x9f;
        else if (*at == 0xf0)
            low = 0x90;
        else if (*at == 0xf4)
            high = 0x8f;
        for (at++; more; more--, at++, low = 0x80, high = 0xbf)
            if (*at < low || *at > high)
                return false;
    }
    return true;
}

static char pax[2 * (ENTRY_PATH_MAX + 64) + 256];
static size_t pax_used;

/* "LENGTH key=value\n", where LENGTH counts itself. */
static void pax_put(const char *key, const char *value) {
    char digits[24];
    size_t rest = 1 + strlen(key) + 1 + strlen(value) + 1, len = rest + 1;
    while (len < rest + (size_t)(text_number(digits, len) - digits))
        len = rest + (size_t)(text_number(digits, len) - digits);
    text_number(digits, len);
    char *at = stpcpy(pax + pax_used, digits);
    at = stpcpy(stpcpy(stpcpy(stpcpy(stpcpy(at, " "), key), "="), value), "\n");
    pax_used = (size_t)(at - pax);
}

static void pax_put_number(const char *key, bool negative, uint64_t value) {
    char text[24] = "-";
    text_number(text + negative, value);
    pax_put(key, text);
}

static int pax_write(void) {
    struct tar_header header = {.name = "././@PaxHeader", .type = 'x'};
    put_octal(header.mode, sizeof header.mode, 0644);
    put_octal(header.uid, sizeof header.uid, 0);
    put_octal(header.gid, sizeof header.gid, 0);
    put_octal(header.size, sizeof header.size, pax_used);
    put_octal(header.mtime, sizeof header.mtime, 0);
    return put_header(&header) || emit(pax, pax_used) || put_padding(pax_used);
}

/* --- files with several names ------------------------------------------------------------------ */

struct link {
    dev_t device;
    ino_t inode;
    uint32_t name; /* offset in link_names; 0: free */
};
static struct link links[LINKS_MAX];
static uint32_t link_count, link_names_used = 1;
static char *link_names;

/* The name under which a file was written before, or NULL; then it is known from now on as `path`. */
static const char *known_link(const struct stat *st, const char *path) {
    size_t len = strlen(path) + 1;
    if (!link_names) {
        void *pages = mmap(NULL, LINK_NAMES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED)
            return NULL;
        link_names = pages;
    }
    uint64_t hash = (st->st_ino ^ st->st_dev << 32) * 0x9e3779b97f4a7c15u;
    for (size_t i = hash >> 48;; i = (i + 1) % LINKS_MAX) {
        struct link *link = &links[i % LINKS_MAX];
        if (link->name && link->inode == st->st_ino && link->device == st->st_dev)
            return link_names + link->name;
        if (link->name)
            continue;
        if (link_count == LINKS_MAX / 2 || len > LINK_NAMES - link_names_used)
            return NULL;
        *link = (struct link){st->st_dev, st->st_ino, link_names_used};
        memcpy(link_names + link_names_used, path, len);
        link_names_used += (uint32_t)len;
        link_count++;
        return NULL;
    }
}

/* --- members ---------------------------------------------------------------------------------- */

static int put_member(char type, const struct stat *st, const char *path, const char *target,
                      uint64_t size) {
    struct tar_header header = {.type = type};
    size_t path_len = strlen(path), target_len = strlen(target);
    char name[ENTRY_PATH_MAX + 1];
    memcpy(name, path, path_len);
    strcpy(name + path_len, type == '5' ? "/" : "");
    bool odd_path = path_len + (type == '5') > sizeof header.name || !is_ascii(path);
    bool odd_target = target_len > sizeof header.link || !is_ascii(target);
    pax_used = 0;
    if ((odd_path && !is_utf8(path)) || (odd_target && !is_utf8(target)))
        pax_put("hdrcharset", "BINARY");
    if (odd_path)
        pax_put("path", name);
    if (odd_target)
        pax_put("linkpath", target);
    if (size >> 33)
        pax_put_number("size", false, size);
    int64_t mtime = st->st_mtim.tv_sec;
    bool odd_time = mtime < 0 || mtime >> 33;
    if (odd_time)
        pax_put_number("mtime", mtime < 0, mtime < 0 ? -(uint64_t)mtime : (uint64_t)mtime);
    if (pax_used && pax_write())
        return -1;
    memcpy(header.name, name, strnlen(name, sizeof header.name));
    memcpy(header.link, target, strnlen(target, sizeof header.link));
    put_octal(header.mode, sizeof header.mode, st->st_mode & 07777);
    put_octal(header.uid, sizeof header.uid, st->st_uid);
    put_octal(header.gid, sizeof header.gid, st->st_gid);
    put_octal(header.size, sizeof header.size, size >> 33 ? 0 : size);
    put_octal(header.mtime, sizeof header.mtime, odd_time ? 0 : (uint64_t)mtime);
    job.record->size++;
    return put_header(&header);
}

static int pack_file(const struct visited *at) {
    struct stat st;
    const char *earlier;
    int fd =
        openat(at->dir_fd, at->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ENOENT || (errno == EACCES && job.req.flags & FILE_UNREADABLE))
            return WALK_ON;
        return job_fail_in(errno == ELOOP ? STEP_FILE_CHANGED : STEP_FILE_TREE, 10, at->path);
    }
    errno = EAGAIN;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode))
        return job_fail_in(STEP_FILE_CHANGED, 2, at->path);
    int r;
    uint64_t size = (uint64_t)st.st_size;
    if (st.st_nlink > 1 && (earlier = known_link(&st, at->path))) {
        r = put_member('1', &st, at->path, earlier, 0);
    } else {
        errno = EFBIG;
        if (size > job.req.length - packed_bytes)
            return job_fail_in(STEP_FILE_BOUND, 1, at->path);
        packed_bytes += size;
        r = put_member('0', &st, at->path, "", size) || emit_file(fd, at->path, size) ||
            put_padding(size);
    }
    close(fd);
    return r ? WALK_STOP : WALK_ON;
}

static int pack_symlink(const struct visited *at) {
    char target[PATH_MAX];
    ssize_t len = readlinkat(at->dir_fd, at->name, target, sizeof target - 1);
    if (len < 0)
        return errno == ENOENT ? WALK_ON : job_fail_in(STEP_FILE_CHANGED, 3, at->path);
    target[len] = 0;
    return put_member('2', &at->st, at->path, target, 0) ? WALK_STOP : WALK_ON;
}

static int pack_one(const struct visited *at) {
    mode_t type = at->st.st_mode & S_IFMT;
    if (filter_excludes(at->path))
        return WALK_PRUNE;
    errno = at->err;
    if (at->err && at->err != EXDEV && at->err != ENOENT &&
        !(at->err == EACCES && job.req.flags & FILE_UNREADABLE))
        return job_fail_in(STEP_FILE_TREE, 6, at->path);
    if (!filter_wants(at->path))
        return WALK_ON; /* something below it may be */
    errno = E2BIG;
    if (job.record->size == job.req.entries)
        return job_fail_in(STEP_FILE_BOUND, 0, at->path);
    if (type == S_IFREG)
        return pack_file(at);
    if (type == S_IFLNK)
        return pack_symlink(at);
    if (type == S_IFDIR || type == S_IFIFO)
        return put_member(type == S_IFDIR ? '5' : '6', &at->st, at->path, "", 0) ? WALK_STOP
                                                                                 : WALK_ON;
    return WALK_ON;
}

int tar_pack(void) {
    static const uint8_t end[2 * TAR_BLOCK];
    int fd = sys_openat_root(job.child->root_fd, job.path,
                             O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return job_fail(errno == ENOTDIR ? STEP_FILE_TYPE : STEP_FILE_OPEN, 2);
    return walk(fd, job.req.depth, pack_one) || emit(end, sizeof end) || emit_flush();
}
