/*
 * user.c - who a command runs as, resolved in the sandbox's own /etc/passwd and /etc/group.
 *
 * Those files are the sandbox's to write: they are opened in its root, must be regular, and only
 * their first 1 MiB counts. A number needs no entry (as under Docker it then has group 0 unless one
 * is given); a name without one is an error.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/securebits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define DATABASE_MAX (1u << 20)
#define ID_LAST      65535u

struct text {
    const char *at;
    size_t len;
};

/* Map a database; an absent one is empty. Never unmapped: the child execs or exits. */
static struct text database(int root_fd, const char *path) {
    struct text out = {NULL, 0};
    struct stat st;
    int fd = sys_openat_root(root_fd, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return out;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size > 0) {
        size_t size = st.st_size > DATABASE_MAX ? DATABASE_MAX : (size_t)st.st_size;
        /* read, not a mapping of the file: the sandbox may truncate it under us */
        char *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy != MAP_FAILED) {
            ssize_t got = 0;
            while (out.len < size && (got = read(fd, copy + out.len, size - out.len)) > 0)
                out.len += (size_t)got;
            out.at = copy;
        }
    }
    close(fd);
    return out;
}

static bool next_line(struct text *all, struct text *line) {
    if (!all->len)
        return false;
    const char *nl = memchr(all->at, '\n', all->len);
    line->at = all->at;
    line->len = nl ? (size_t)(nl - all->at) : all->len;
    size_t used = nl ? line->len + 1 : line->len;
    all->at += used;
    all->len -= used;
    return true;
}

static struct text field(struct text *line, char separator) {
    const char *stop = line->len ? memchr(line->at, separator, line->len) : NULL;
    struct text out = {line->at, stop ? (size_t)(stop - line->at) : line->len};
    size_t used = stop ? out.len + 1 : out.len;
    if (used) {
        line->at += used;
        line->len -= used;
    }
    return out;
}

static bool same(struct text a, struct text b) {
    return a.len == b.len && (!a.len || !memcmp(a.at, b.at, a.len));
}

static bool number(struct text t, uint32_t *out) {
    uint32_t n = 0;
    if (!t.len || t.len > 6)
        return false;
    for (size_t i = 0; i < t.len; i++) {
        if (t.at[i] < '0' || t.at[i] > '9')
            return false;
        n = n * 10 + (uint32_t)(t.at[i] - '0');
    }
    *out = n;
    return n <= ID_LAST;
}

static bool digits_only(struct text t) {
    for (size_t i = 0; i < t.len; i++)
        if (t.at[i] < '0' || t.at[i] > '9')
            return false;
    return t.len > 0;
}

static void add_group(struct user *out, gid_t gid) {
    for (size_t i = 0; i < out->group_count; i++)
        if (out->groups[i] == gid)
            return;
    if (out->group_count < sizeof out->groups / sizeof *out->groups)
        out->groups[out->group_count++] = gid;
}

static int find_group(int root_fd, struct text wanted, gid_t *out) {
    uint32_t n;
    if (number(wanted, &n)) {
        *out = n;
        return 0;
    }
    struct text all = database(root_fd, "etc/group"), line;
    while (wanted.len && !digits_only(wanted) && next_line(&all, &line)) {
        struct text name = field(&line, ':');
        field(&line, ':');
        if (same(name, wanted) && number(field(&line, ':'), &n)) {
            *out = n;
            return 0;
        }
    }
    errno = ENOENT;
    return -1;
}

/* Every group that lists the user as a member. */
static void supplementary(int root_fd, struct text name, struct user *out) {
    struct text all = database(root_fd, "etc/group"), line;
    while (next_line(&all, &line)) {
        uint32_t gid;
        field(&line, ':');
        field(&line, ':');
        if (!number(field(&line, ':'), &gid))
            continue;
        while (line.len)
            if (same(field(&line, ','), name)) {
                add_group(out, gid);
                break;
            }
    }
}

int user_find(int root_fd, const char *spec, struct user *out, struct failure *fail) {
    struct text rest = {spec, strlen(spec)}, wanted, all, line, name = {NULL, 0};
    bool has_group = memchr(spec, ':', rest.len) != NULL;
    uint32_t uid = 0, gid = 0;
    wanted = field(&rest, ':');
    bool by_number = digits_only(wanted), found = false;
    memset(out, 0, offsetof(struct user, home));
    strcpy(out->home, "/");
    errno = EINVAL;
    if (!wanted.len || (by_number && !number(wanted, &uid)))
        return fail_at(fail, STEP_USER, 0);
    if (by_number && !uid && !has_group) {
        /* the default, and no need of a file: two opens through FUSE spared per exec */
        strcpy(out->home, "/root");
        return 0;
    }
    all = database(root_fd, "etc/passwd");
    while (!found && next_line(&all, &line)) {
        uint32_t entry_uid, entry_gid;
        struct text entry = field(&line, ':'), home;
        field(&line, ':');
        if (!number(field(&line, ':'), &entry_uid) || !number(field(&line, ':'), &entry_gid))
            continue;
        if (by_number ? entry_uid != uid : !same(entry, wanted))
            continue;
        found = true;
        name = entry;
        uid = entry_uid;
        gid = entry_gid;
        field(&line, ':');
        home = field(&line, ':');
        if (home.len && home.len < sizeof out->home) {
            memcpy(out->home, home.at, home.len);
            out->home[home.len] = 0;
        }
    }
    errno = ENOENT;
    if (!found && !by_number)
        return fail_at(fail, STEP_USER, 0);
    if (has_group) {
        gid_t given;
        if (find_group(root_fd, rest, &given))
            return fail_at(fail, STEP_GROUP, 0);
        gid = given;
    } else if (found) {
        supplementary(root_fd, name, out);
    }
    out->uid = uid;
    out->gid = gid;
    return 0;
}

/*
 * Become the user, for good. With SECBIT_NO_SETUID_FIXUP (which PID 1 has) changing ids leaves every
 * capability in place, so they are taken away by hand; the securebits go too, or su(1) inside the
 * sandbox would leave them with whom it switches to.
 */
int user_become(const struct user *user, struct failure *fail) {
    uint64_t caps = user->uid == 0 ? node.caps : 0;
    /* From here the sandbox's user owns this process: nothing it could use may be left in it. */
    explicit_bzero(node.token, sizeof node.token);
    /* With one id there are no groups to have; what only one of them may read stays unread. */
    if ((!node.one_id && setgroups(user->group_count, user->groups)) ||
        setresgid(user->gid, user->gid, user->gid) || setresuid(user->uid, user->uid, user->uid))
        return fail_at(fail, STEP_CREDENTIALS, 0);
    if (prctl(PR_SET_SECUREBITS, 0UL, 0UL, 0UL, 0UL))
        return fail_at(fail, STEP_CREDENTIALS, 1);
    if (prctl(PR_CAP_AMBIENT, (unsigned long)PR_CAP_AMBIENT_CLEAR_ALL, 0UL, 0UL, 0UL))
        return fail_at(fail, STEP_CREDENTIALS, 2);
    if (sys_capset(caps, caps))
        return fail_at(fail, STEP_CREDENTIALS, 3);
    return 0;
}
