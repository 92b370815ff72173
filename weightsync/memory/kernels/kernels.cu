// Compiled by NVRTC, without headers. Kernels that copy and digest work through a table of tiles: parts of 2-D
// copies, small enough (`TILE_NBYTES` in digest_tiles.py) that 32-bit numbers count what is in one. A block
// takes every gridDim-th tile. Except where a tile is transposed its threads never wait for each other, so
// the next tile's loads start before the last one's stores have ended. KERNEL_name compiles only that kernel.

using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int kThreads = 512;
constexpr int kQuantizers = 256;  // threads of a block that quantises
constexpr int kUnroll = 4;  // loads in flight per thread; past the end the last one is repeated

struct __align__(16) CopyTile {
    int64 src, dst, rows, row_nbytes, src_pitch, dst_pitch;
};

struct __align__(16) DigestTile {
    int64 address, index;  // index: the number of the byte at address in the whole tensor
    int64 rows, row_nbytes, pitch, index_pitch;
    uint32 tensor, mask;  // mask: in each word, the bits that are all set only in NaN and Inf; 0: no check
    int64 unused;
};

// Rows that are copied from src to live.address first, and then digested there.
struct __align__(16) WriteTile {
    DigestTile live;
    int64 src, src_pitch;
};

// Number / divisor without a division; exact while both are below 2**16.
struct Divider {
    uint32 divisor, factor;
    __device__ explicit Divider(uint32 d) : divisor(d), factor(0xffffffffu / d + 1) {}
    __device__ uint32 operator()(uint32 number) const {
        return divisor == 1 ? number : __umulhi(number, factor);
    }
};

template <typename Unit>
__device__ __forceinline__ void copy_row(const CopyTile& tile) {
    const uint32 count = static_cast<uint32>(tile.row_nbytes) / sizeof(Unit);
    const Unit* src = reinterpret_cast<const Unit*>(tile.src);
    Unit* dst = reinterpret_cast<Unit*>(tile.dst);
#pragma unroll 1
    for (uint32 start = threadIdx.x; start < count; start += kThreads * kUnroll) {
        Unit units[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            units[k] = __ldcs(src + min(start + k * kThreads, count - 1));
        }
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const uint32 i = start + k * kThreads;
            if (i < count) __stcs(dst + i, units[k]);
        }
    }
}

template <typename Unit>
__device__ __forceinline__ void copy_rows(const CopyTile& tile) {
    const uint32 per_row = static_cast<uint32>(tile.row_nbytes) / sizeof(Unit);
    const uint32 count = tile.rows * per_row;
    const Divider row_of(per_row);
#pragma unroll 1
    for (uint32 start = threadIdx.x; start < count; start += kThreads * kUnroll) {
        Unit units[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const uint32 i = min(start + k * kThreads, count - 1), row = row_of(i), at = i - row * per_row;
            units[k] = __ldcs(reinterpret_cast<const Unit*>(tile.src + row * tile.src_pitch) + at);
        }
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const uint32 i = start + k * kThreads, row = row_of(i), at = i - row * per_row;
            if (i < count) __stcs(reinterpret_cast<Unit*>(tile.dst + row * tile.dst_pitch) + at, units[k]);
        }
    }
}

template <typename Unit>
__device__ __forceinline__ void copy_tile(const CopyTile& tile) {
    if (tile.rows == 1) {
        copy_row<Unit>(tile);
    } else {
        copy_rows<Unit>(tile);
    }
}

#ifdef KERNEL_copy_tiles
extern "C" __global__ void __launch_bounds__(kThreads, 2) copy_tiles(const CopyTile* tiles, int64 num_tiles) {
    CopyTile next = tiles[blockIdx.x];  // there are at least as many tiles as blocks
    for (int64 i = blockIdx.x; i < num_tiles; i += gridDim.x) {
        const CopyTile tile = next;
        next = tiles[min(i + gridDim.x, num_tiles - 1)];
        int64 bits = tile.src | tile.dst | tile.row_nbytes;
        if (tile.rows > 1) bits |= tile.src_pitch | tile.dst_pitch;
        if (bits % 16 == 0) {
            copy_tile<uint4>(tile);
        } else if (bits % 8 == 0) {
            copy_tile<uint2>(tile);
        } else if (bits % 4 == 0) {
            copy_tile<uint32>(tile);
        } else if (bits % 2 == 0) {
            copy_tile<unsigned short>(tile);
        } else {
            copy_tile<unsigned char>(tile);
        }
    }
}
#endif

// Turns tiles of at most kSide * kSide elements in shared memory, for global accesses along the rows of
// both sides: row r's element c goes to dst + c * dst_pitch + r * kSize. Rows in shared memory are 16 bytes
// longer than kSide elements, and another 16 bytes follow each group of kGroup rows. So what 8 lanes read is
// in different banks: 16 bytes per lane down a column, each in a group of its own.
template <typename Element>
struct Transpose {
    static constexpr int kSize = sizeof(Element);
    static constexpr int kSide = kSize <= 2 ? 128 : 64;  // `SIDES` in weightsync/memory/kernels/device_kernels.py
    static constexpr int kGroup = 16 / kSize;
    static constexpr int kPitch = kSide * kSize + 16;
    static constexpr int kNbytes = kSide * kPitch + kSide / kGroup * 16;

    // A thread's way through kSide rows: neighbouring lanes are on neighbouring units of a row.
    template <typename Unit>
    struct Walk {
        static constexpr int kUnits = kSide * kSize / sizeof(Unit);  // in a whole row
        static constexpr int kLanes = sizeof(Unit) == 16 ? 8 : sizeof(Unit) == 8 ? 16 : 32;
        static constexpr int kRows = kThreads / kLanes;
        static constexpr int kAcross = kUnits / kLanes, kDown = kSide / kRows;
        static constexpr int kMost = 8 / kAcross;  // more loads in flight take too many registers
        static constexpr int kFlying = kDown < kMost ? kDown : kMost;  // rows that are loaded together
        static_assert(kUnits % kLanes == 0 && kSide % kRows == 0 && kDown % kFlying == 0);
    };

    static __device__ __forceinline__ uint32 place(uint32 row) { return row * kPitch + row / kGroup * 16; }

    template <typename Unit>
    static __device__ __forceinline__ void read(const CopyTile& tile, char* shared) {
        using By = Walk<Unit>;
        const uint32 rows = tile.rows, per_row = static_cast<uint32>(tile.row_nbytes) / sizeof(Unit);
        const uint32 lane = threadIdx.x % By::kLanes;
#pragma unroll 1
        for (uint32 start = threadIdx.x / By::kLanes; start < rows; start += By::kRows * By::kFlying) {
            Unit units[By::kFlying][By::kAcross] = {};  // else ptxas keeps them from loop to loop
#pragma unroll
            for (int k = 0; k < By::kFlying; ++k) {
                const uint32 row = start + k * By::kRows;
                const Unit* src = reinterpret_cast<const Unit*>(tile.src + row * tile.src_pitch) + lane;
#pragma unroll
                for (int l = 0; l < By::kAcross; ++l) {
                    if (row < rows && lane + l * By::kLanes < per_row) units[k][l] = __ldcs(src + l * By::kLanes);
                }
            }
#pragma unroll
            for (int k = 0; k < By::kFlying; ++k) {
                const uint32 row = start + k * By::kRows;
                Unit* to = reinterpret_cast<Unit*>(shared + place(row)) + lane;
#pragma unroll
                for (int l = 0; l < By::kAcross; ++l) {
                    if (row < rows && lane + l * By::kLanes < per_row) to[l * By::kLanes] = units[k][l];
                }
            }
        }
    }

    // Returns the elements of a column from `row` on. They are in one group of rows.
    template <typename Unit>
    static __device__ __forceinline__ Unit down(const char* shared, uint32 row, uint32 column) {
        union {
            Element elements[sizeof(Unit) / kSize];
            Unit unit;
        } turned;
        const char* at = shared + place(row) + column * kSize;
#pragma unroll
        for (int k = 0; k < sizeof(Unit) / kSize; ++k) {
            turned.elements[k] = *reinterpret_cast<const Element*>(at + k * kPitch);
        }
        return turned.unit;
    }

    template <typename Unit>
    static __device__ __forceinline__ void write(const CopyTile& tile, const char* shared) {
        using By = Walk<Unit>;
        const uint32 columns = static_cast<uint32>(tile.row_nbytes) / kSize;
        const uint32 per_column = static_cast<uint32>(tile.rows) * kSize / sizeof(Unit);
#pragma unroll 1
        for (uint32 column = threadIdx.x / By::kLanes; column < columns; column += By::kRows) {
            Unit* dst = reinterpret_cast<Unit*>(tile.dst + column * tile.dst_pitch);
#pragma unroll
            for (int l = 0; l < By::kAcross; ++l) {
                const uint32 at = threadIdx.x % By::kLanes + l * By::kLanes;
                if (at < per_column) __stcs(dst + at, down<Unit>(shared, at * (sizeof(Unit) / kSize), column));
            }
        }
    }

    // Each side takes the widest units that its addresses and its part of a row allow.
    static __device__ __forceinline__ void turn(const CopyTile& tile, char* shared) {
        const int64 from = tile.src | tile.src_pitch | tile.row_nbytes;
        if (from % 16 == 0) {
            read<uint4>(tile, shared);
        } else if (kSize == 8 || from % 8 == 0) {
            read<uint2>(tile, shared);
        } else if constexpr (kSize <= 4) {
            if (kSize == 4 || from % 4 == 0) {
                read<uint32>(tile, shared);
            } else {
                read<Element>(tile, shared);
            }
        }
        __syncthreads();
        const int64 to = tile.dst | tile.dst_pitch | tile.rows * kSize;
        if (to % 16 == 0) {
            write<uint4>(tile, shared);
        } else if (kSize == 8 || to % 8 == 0) {
            write<uint2>(tile, shared);
        } else if constexpr (kSize <= 4) {
            if (kSize == 4 || to % 4 == 0) {
                write<uint32>(tile, shared);
            } else {
                write<Element>(tile, shared);
            }
        }
        __syncthreads();  // the next tile takes the same shared memory
    }
};

#define TRANSPOSE(name, Element)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) name(const CopyTile* tiles, int64 num_tiles) { \
        __shared__ __align__(16) char shared[Transpose<Element>::kNbytes];                                    \
        CopyTile next = tiles[blockIdx.x]; /* there are at least as many tiles as blocks */                   \
        for (int64 i = blockIdx.x; i < num_tiles; i += gridDim.x) {                                           \
            const CopyTile tile = next;                                                                       \
            next = tiles[min(i + gridDim.x, num_tiles - 1)];                                                  \
            Transpose<Element>::turn(tile, shared);                                                           \
        }                                                                                                     \
    }

#ifdef KERNEL_transpose_tiles_1
TRANSPOSE(transpose_tiles_1, unsigned char)
#endif
#ifdef KERNEL_transpose_tiles_2
TRANSPOSE(transpose_tiles_2, unsigned short)
#endif
#ifdef KERNEL_transpose_tiles_4
TRANSPOSE(transpose_tiles_4, uint32)
#endif
#ifdef KERNEL_transpose_tiles_8
TRANSPOSE(transpose_tiles_8, uint2)
#endif

// The digest of weightsync/memory/kernels/digests.py. A lane is 4 bytes, whatever the word: one factor and one product
// serve all its words. The factors of a row's lanes are in shared memory in pairs: first pair of each
// 16-byte unit, then second pair of each; so the threads of a warp, on neighbouring units, read neighbouring
// pairs and no bank twice.
// With kFlags, tensors are flagged in which any word has all bits of its tile's mask.
template <typename Word, bool kFlags>
struct Digest {
    static constexpr int kColumns = 4096;
    static constexpr int kPerLane = 4 / sizeof(Word);
    static constexpr int kUnits = kColumns / kPerLane / 4;  // in 4096 words
    static constexpr uint32 kOnes = sizeof(Word) == 1 ? 0x01010101u : sizeof(Word) == 2 ? 0x00010001u : 1u;
    static constexpr uint32 kSigns = sizeof(Word) == 1 ? 0x80808080u : sizeof(Word) == 2 ? 0x80008000u : 0x80000000u;

    const ulonglong2* pairs;
    const uint64* zeros;  // each unit's digest if all its words were zero: the sum of factor * 1
    const uint64* rows;

    static __device__ void fill(ulonglong2* pairs, uint64* zeros, const ulonglong2* columns) {
        for (int unit = threadIdx.x; unit < kUnits; unit += kThreads) {
            const ulonglong2 first = columns[2 * unit], second = columns[2 * unit + 1];
            pairs[unit] = first;
            pairs[kUnits + unit] = second;
            zeros[unit] = (first.x + first.y + second.x + second.y) * kOnes;
        }
    }

    // Adds factor * lane: the products of the factor's halves, kept apart until the end.
    static __device__ __forceinline__ void add(uint64& low, uint32& high, uint64 factor, uint32 lane) {
        low += static_cast<uint64>(static_cast<uint32>(factor)) * lane;
        high += static_cast<uint32>(factor >> 32) * lane;
    }

    // The lanes of units in one column, each times the factor of its row, added up; and these factors.
    struct Sums {
        uint64 low[4] = {}, of_rows = 0;
        uint32 high[4] = {};

        __device__ __forceinline__ void add(uint64 row, const uint4& unit) {
            Digest::add(low[0], high[0], row, unit.x);
            Digest::add(low[1], high[1], row, unit.y);
            Digest::add(low[2], high[2], row, unit.z);
            Digest::add(low[3], high[3], row, unit.w);
            of_rows += row;
        }

        __device__ __forceinline__ uint64 lane(int k) const { return low[k] + (static_cast<uint64>(high[k]) << 32); }
    };

    // Neighbouring tiles without gaps: each thread's units stay in the same columns, whose factors are needed
    // once, at the end.
    struct Columns {
        static constexpr int kCount = kUnits > kThreads ? kUnits / kThreads : 1;
        uint32 first = 0;
        Sums sums[kCount];
    };

    __device__ __forceinline__ uint64 of_columns(const Columns& columns) const {
        uint64 sum = 0;
#pragma unroll
        for (int k = 0; k < Columns::kCount; ++k) {
            const uint32 column = (columns.first + k * kThreads) % kUnits;
            const ulonglong2 first = pairs[column], second = pairs[kUnits + column];
            const Sums& of = columns.sums[k];
            sum += first.x * of.lane(0) + first.y * of.lane(1) + second.x * of.lane(2) + second.y * of.lane(3);
            sum += zeros[column] * of.of_rows;
        }
        return sum;
    }

    __device__ __forceinline__ uint64 of_unit(const uint4& unit, uint32 column) const {
        const ulonglong2 first = pairs[column], second = pairs[kUnits + column];
        uint64 low = zeros[column];
        uint32 high = 0;
        add(low, high, first.x, unit.x);
        add(low, high, first.y, unit.y);
        add(low, high, second.x, unit.z);
        add(low, high, second.y, unit.w);
        return low + (static_cast<uint64>(high) << 32);
    }

    // Sets each word's sign bit, unless the word has all bits of the mask: then nothing carries into it.
    static __device__ __forceinline__ uint32 finite_signs(uint32 part, uint32 mask) {
        return (~part & mask) + ~kSigns;
    }

    __device__ __forceinline__ uint64 of_units(const DigestTile& tile, uint64* flags) const {
        uint32 finite = kSigns;
        const uint32 per_row = static_cast<uint32>(tile.row_nbytes) / 16;
        const uint32 count = tile.rows * per_row;
        const Divider row_of(per_row);
        // In units, 32 bits suffice up to 64 GiB, the limit in weightsync/memory/kernels/digest_tiles.py.
        const uint32 first = tile.index / 16, index_pitch = tile.index_pitch / 16;
        uint64 sum = 0;
#pragma unroll 1
        for (uint32 start = threadIdx.x; start < count; start += kThreads * kUnroll) {
            uint4 units[kUnroll];
            uint64 factors[kUnroll];
            uint32 columns[kUnroll];
#pragma unroll
            for (int k = 0; k < kUnroll; ++k) {
                const uint32 i = min(start + k * kThreads, count - 1), row = row_of(i), at = i - row * per_row;
                units[k] = __ldcs(reinterpret_cast<const uint4*>(tile.address + row * tile.pitch) + at);
                const uint32 index = first + row * index_pitch + at;
                factors[k] = __ldg(rows + index / kUnits);
                columns[k] = index % kUnits;
            }
#pragma unroll
            for (int k = 0; k < kUnroll; ++k) {
                if constexpr (kFlags) {  // also without a mask: a branch would need more registers than there are
                    finite &= finite_signs(units[k].x, tile.mask) & finite_signs(units[k].y, tile.mask);
                    finite &= finite_signs(units[k].z, tile.mask) & finite_signs(units[k].w, tile.mask);
                }
                const uint64 of_row = of_unit(units[k], columns[k]) * factors[k];
                if (start + k * kThreads < count) sum += of_row;
            }
        }
        if (kFlags && tile.mask && (~finite & kSigns)) flags[tile.tensor] = 1;
        return sum;
    }

    __device__ __forceinline__ uint64 of_words(const DigestTile& tile, uint64* flags) const {
        const Word mask = static_cast<Word>(tile.mask);
        const uint32 per_row = static_cast<uint32>(tile.row_nbytes) / sizeof(Word);
        const uint32 count = tile.rows * per_row;
        const Divider row_of(per_row);
        uint64 sum = 0;
#pragma unroll 1
        for (uint32 i = threadIdx.x; i < count; i += kThreads) {
            const uint32 row = row_of(i), at = i - row * per_row;
            const uint64 word = reinterpret_cast<const Word*>(tile.address + row * tile.pitch)[at];
            if (kFlags && mask && (word & mask) == mask) flags[tile.tensor] = 1;
            const uint64 index = static_cast<uint64>(tile.index + row * tile.index_pitch) / sizeof(Word) + at;
            const uint32 column = index % kColumns, lane = column / kPerLane, place = lane % 4;
            const ulonglong2 factors = pairs[place / 2 * kUnits + lane / 4];
            const uint64 factor = (place % 2 ? factors.y : factors.x) << (column % kPerLane * (8 * sizeof(Word)));
            sum += factor * (word + 1) * __ldg(rows + index / kColumns);
        }
        return sum;
    }

    // Starts to load a thread's units of a tile of one row; past the end the last one is repeated.
    static_assert(kThreads * kUnroll * 16 == 32 << 10, "all of a tile: TILE_NBYTES in weightsync/memory/kernels/digest_tiles.py");
    static __device__ __forceinline__ void load(const DigestTile& tile, uint4* units) {
        const uint32 count = static_cast<uint32>(tile.row_nbytes) / 16;
        const uint4* address = reinterpret_cast<const uint4*>(tile.address);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) units[k] = __ldcs(address + min(threadIdx.x + k * kThreads, count - 1));
    }

    // Adds a loaded tile of one row to `columns`. Returns the digest of what these had, if that was elsewhere.
    __device__ __forceinline__ uint64 of_row(
        const DigestTile& tile, const uint4* units, uint64* flags, Columns& columns) const {
        const uint32 count = static_cast<uint32>(tile.row_nbytes) / 16;
        const uint32 first = tile.index / 16 + threadIdx.x;
        uint64 sum = 0;
        if (first % kUnits != columns.first) {
            sum = of_columns(columns);
            columns = {first % kUnits};
        }
        uint32 finite = kSigns;
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const bool is_there = threadIdx.x + k * kThreads < count;
            const uint64 row = is_there ? __ldg(rows + (first + k * kThreads) / kUnits) : 0;
            columns.sums[k % Columns::kCount].add(row, units[k]);
            if constexpr (kFlags) {
                finite &= finite_signs(units[k].x, tile.mask) & finite_signs(units[k].y, tile.mask);
                finite &= finite_signs(units[k].z, tile.mask) & finite_signs(units[k].w, tile.mask);
            }
        }
        if (kFlags && tile.mask && (~finite & kSigns)) flags[tile.tensor] = 1;
        return sum;
    }

    __device__ __forceinline__ uint64 of_tile(const DigestTile& tile, uint64* flags) const {
        int64 bits = tile.address | tile.index | tile.row_nbytes;
        if (tile.rows > 1) bits |= tile.pitch | tile.index_pitch;
        return bits % 16 == 0 ? of_units(tile, flags) : of_words(tile, flags);
    }
};

// Adds a warp's sums to `total`. All lanes take part.
__device__ __forceinline__ void add_warp(uint64* total, uint64 sum) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

// Neighbouring tiles that a block takes together: mostly of one tensor, whose sum it then adds up once.
// At most 16, and few enough that every block gets its part of the work.
__device__ __forceinline__ uint32 chunk_of(int64 num_tiles) {
    uint32 chunk = 1;
    while (chunk < 16 && num_tiles >= static_cast<int64>(gridDim.x) * chunk * 16) chunk *= 2;
    return chunk;
}

template <typename Word, bool kFlags>
__device__ __forceinline__ void digest_tiles(
    const DigestTile* tiles, int64 num_tiles, const ulonglong2* columns, const uint64* rows, uint64* totals,
    uint64* flags) {
    __shared__ ulonglong2 pairs[2 * Digest<Word, kFlags>::kUnits];
    __shared__ uint64 zeros[Digest<Word, kFlags>::kUnits];
    Digest<Word, kFlags>::fill(pairs, zeros, columns);
    __syncthreads();
    const Digest<Word, kFlags> digest{pairs, zeros, rows};
    constexpr uint32 kNone = ~0u;
    uint32 tensor = kNone;
    uint64 sum = 0;
    const uint32 chunk = chunk_of(num_tiles);
    int64 i = static_cast<int64>(blockIdx.x) * chunk;
    DigestTile next = tiles[min(i, num_tiles - 1)];
    while (i < num_tiles) {
        const DigestTile tile = next;
        i += (i + 1) % chunk ? 1 : 1 + static_cast<int64>(gridDim.x - 1) * chunk;
        next = tiles[min(i, num_tiles - 1)];
        if (tile.tensor != tensor) {
            if (tensor != kNone) add_warp(totals + tensor, sum);
            tensor = tile.tensor;
            sum = 0;
        }
        sum += digest.of_tile(tile, flags);
    }
    if (tensor != kNone) add_warp(totals + tensor, sum);
}

// A block's way through a table: chunks of neighbouring tiles. Past the end it has the last tile.
template <typename Tile>
struct Chunks {
    const Tile* tiles;
    const int64 num_tiles;
    const uint32 chunk;

    __device__ __forceinline__ Chunks(const Tile* tiles, int64 num_tiles)
        : tiles(tiles), num_tiles(num_tiles), chunk(chunk_of(num_tiles)) {}
    __device__ __forceinline__ int64 first() const { return static_cast<int64>(blockIdx.x) * chunk; }
    __device__ __forceinline__ int64 after(int64 i) const {
        return (i + 1) % chunk ? i + 1 : i + 1 + (gridDim.x - 1) * int64(chunk);
    }
    __device__ __forceinline__ Tile operator[](int64 i) const { return tiles[min(i, num_tiles - 1)]; }
};

// Tiles that are one row of whole units. A block loads its next tile before it digests the one that it has, so
// one block suffices for a multiprocessor, and has its registers.
template <typename Word, bool kFlags>
__device__ __forceinline__ void digest_rows(
    const DigestTile* tiles, int64 num_tiles, const ulonglong2* columns, const uint64* rows, uint64* totals,
    uint64* flags) {
    using Its = Digest<Word, kFlags>;
    __shared__ ulonglong2 pairs[2 * Its::kUnits];
    __shared__ uint64 zeros[Its::kUnits];
    Its::fill(pairs, zeros, columns);
    __syncthreads();
    const Its digest{pairs, zeros, rows};
    const Chunks<DigestTile> chunks(tiles, num_tiles);
    int64 i = chunks.first(), following = chunks.after(i);
    DigestTile tile = chunks[i], next = chunks[following];
    uint4 units[kUnroll], coming[kUnroll];
    Its::load(tile, units);
    uint32 tensor = tile.tensor;
    uint64 sum = 0;
    typename Its::Columns of_rows;
    while (i < num_tiles) {
        Its::load(next, coming);
        i = following;
        following = chunks.after(i);
        const DigestTile last = chunks[following];
        if (tile.tensor != tensor) {
            add_warp(totals + tensor, sum + digest.of_columns(of_rows));
            tensor = tile.tensor;
            sum = 0;
            of_rows = {};
        }
        sum += digest.of_row(tile, units, flags, of_rows);
        tile = next;
        next = last;
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) units[k] = coming[k];
    }
    add_warp(totals + tensor, sum + digest.of_columns(of_rows));
}

// A thread's units of a tile of whole units, all of which fit its registers: past the end it has the last one.
struct Units {
    const uint32 per_row, count;
    const Divider row_of;

    __device__ explicit Units(const DigestTile& tile)
        : per_row(static_cast<uint32>(tile.row_nbytes) / 16),
          count(static_cast<uint32>(tile.rows) * per_row),
          row_of(per_row) {}

    // Calls act(k, row, at, is_there) for the k-th unit: unit `at` of its row.
    template <typename Act>
    __device__ __forceinline__ void each(Act act) const {
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            const uint32 i = min(threadIdx.x + k * kThreads, count - 1), row = row_of(i);
            act(k, row, i - row * per_row, threadIdx.x + k * kThreads < count);
        }
    }
};

__device__ __forceinline__ void load_source(const WriteTile& tile, uint4* units) {
    Units(tile.live).each([&](int k, uint32 row, uint32 at, bool) {
        units[k] = __ldcs(reinterpret_cast<const uint4*>(tile.src + row * tile.src_pitch) + at);
    });
}

// A volatile load gets what a thread has stored from where all of the device sees it: it passes by the caches
// of a multiprocessor, and the compiler may not put the stored registers in its place.
__device__ __forceinline__ uint4 read_back(const uint4* address) {
    uint4 unit;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(address)
                 : "memory");
    return unit;
}

// Copies tiles and digests what it reads back: mostly from the L2 cache. A block loads its next tile meanwhile.
template <typename Word>
__device__ __forceinline__ void write_tiles(
    const WriteTile* tiles, int64 num_tiles, const ulonglong2* columns, const uint64* rows, uint64* totals) {
    using Its = Digest<Word, false>;
    __shared__ ulonglong2 pairs[2 * Its::kUnits];
    __shared__ uint64 zeros[Its::kUnits];
    Its::fill(pairs, zeros, columns);
    __syncthreads();
    const Its digest{pairs, zeros, rows};
    const Chunks<WriteTile> chunks(tiles, num_tiles);
    int64 i = chunks.first(), following = chunks.after(i);
    WriteTile tile = chunks[i], next = chunks[following];
    uint4 units[kUnroll];
    load_source(tile, units);
    uint32 tensor = tile.live.tensor;
    uint64 sum = 0;
    while (i < num_tiles) {
        const DigestTile live = tile.live;
        const Units its(live);
        const auto place = [&](uint32 row, uint32 at) {
            return reinterpret_cast<uint4*>(live.address + row * live.pitch) + at;
        };
        its.each([&](int k, uint32 row, uint32 at, bool is_there) {
            if (is_there) __stcg(place(row, at), units[k]);
        });
        load_source(next, units);
        i = following;
        following = chunks.after(i);
        tile = next;
        next = chunks[following];
        uint4 back[kUnroll];
        its.each([&](int k, uint32 row, uint32 at, bool) { back[k] = read_back(place(row, at)); });
        if (live.tensor != tensor) {
            add_warp(totals + tensor, sum);
            tensor = live.tensor;
            sum = 0;
        }
        const uint32 first = live.index / 16, index_pitch = live.index_pitch / 16;
        its.each([&](int k, uint32 row, uint32 at, bool is_there) {
            const uint32 index = first + row * index_pitch + at;
            if (is_there) sum += digest.of_unit(back[k], index % Its::kUnits) * __ldg(rows + index / Its::kUnits);
        });
    }
    add_warp(totals + tensor, sum);
}

#define WRITE(name, Word)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name(                                           \
        const WriteTile* tiles, int64 num_tiles, const ulonglong2* columns, const uint64* rows, uint64* totals, \
        uint64*) {                                                                                            \
        write_tiles<Word>(tiles, num_tiles, columns, rows, totals);                                           \
    }

#ifdef KERNEL_write_tiles_1
WRITE(write_tiles_1, unsigned char)
#endif
#ifdef KERNEL_write_tiles_2
WRITE(write_tiles_2, unsigned short)
#endif
#ifdef KERNEL_write_tiles_4
WRITE(write_tiles_4, uint32)
#endif

#define DIGEST_ROWS(name, Word, kFlags)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name(                                           \
        const DigestTile* tiles, int64 num_tiles, const ulonglong2* columns, const uint64* rows, uint64* totals, \
        uint64* flags) {                                                                      \
        digest_rows<Word, kFlags>(tiles, num_tiles, columns, rows, totals, flags);                    \
    }

#define DIGEST(name, Word, kFlags)                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) name(                           \
        const DigestTile* tiles, int64 num_tiles, const ulonglong2* columns, const uint64* rows, uint64* totals, \
        uint64* flags) {                                                                      \
        digest_tiles<Word, kFlags>(tiles, num_tiles, columns, rows, totals, flags);                   \
    }

#ifdef KERNEL_digest_words_1
DIGEST(digest_words_1, unsigned char, false)
#endif
#ifdef KERNEL_digest_rows_1
DIGEST_ROWS(digest_rows_1, unsigned char, false)
#endif
#ifdef KERNEL_flag_words_1
DIGEST(flag_words_1, unsigned char, true)
#endif
#ifdef KERNEL_flag_rows_1
DIGEST_ROWS(flag_rows_1, unsigned char, true)
#endif
#ifdef KERNEL_digest_words_2
DIGEST(digest_words_2, unsigned short, false)
#endif
#ifdef KERNEL_digest_rows_2
DIGEST_ROWS(digest_rows_2, unsigned short, false)
#endif
#ifdef KERNEL_flag_words_2
DIGEST(flag_words_2, unsigned short, true)
#endif
#ifdef KERNEL_flag_rows_2
DIGEST_ROWS(flag_rows_2, unsigned short, true)
#endif
#ifdef KERNEL_digest_words_4
DIGEST(digest_words_4, uint32, false)
#endif
#ifdef KERNEL_digest_rows_4
DIGEST_ROWS(digest_rows_4, uint32, false)
#endif
#ifdef KERNEL_flag_words_4
DIGEST(flag_words_4, uint32, true)
#endif
#ifdef KERNEL_flag_rows_4
DIGEST_ROWS(flag_rows_4, uint32, true)
#endif

// Weights of 16 bits, which the compiler has no types for without headers.
struct Bfloat16 {
    unsigned short bits;
    static constexpr float kEpsilon = 0.0078125f;
};
struct Float16 {
    unsigned short bits;
    static constexpr float kEpsilon = 0.0009765625f;
};

__device__ __forceinline__ float widened(Bfloat16 x) { return __uint_as_float(static_cast<uint32>(x.bits) << 16); }
__device__ __forceinline__ float widened(Float16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}
__device__ __forceinline__ float widened(float x) { return x; }

// The value of Element that is nearest to a float.
template <typename Element>
__device__ __forceinline__ float rounded(float x);
template <>
__device__ __forceinline__ float rounded<Bfloat16>(float x) {
    const uint32 bits = __float_as_uint(x);
    return x == x ? __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u) : x;
}
template <>
__device__ __forceinline__ float rounded<Float16>(float x) {
    Float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return widened(result);
}
template <>
__device__ __forceinline__ float rounded<float>(float x) {
    return x;
}

template <typename Element>
__device__ __forceinline__ float epsilon() {
    return Element::kEpsilon;
}
template <>
__device__ __forceinline__ float epsilon<float>() {
    return 1.1920928955078125e-7f;
}

// Two to float8 (e4m3), the first in the lower byte; beyond its range to the greatest, NaN to NaN.
__device__ __forceinline__ uint32 to_fp8(float first, float second) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

// The arithmetic of each rule, as quantising/quantize.py has it. `largest` is the greatest magnitude of a block.
// A call turns two elements to two bytes, the first to the lower one.
template <typename Element>
struct Fp8OfVllm {
    float scale, inverse;
    __device__ explicit Fp8OfVllm(float largest)
        : scale(__fdiv_rn(largest < 1e-4f ? 1e-4f : largest, 448.0f)), inverse(__fdiv_rn(1.0f, scale)) {}
    __device__ uint32 operator()(float first, float second) const {
        return to_fp8(__fmul_rn(first, inverse), __fmul_rn(second, inverse));
    }
};

// As SGLang's kernel is compiled for Hopper, with fast math: the reciprocal is approximate, and denormals are
// zero. A row of zeros has values of zero.
template <typename Element>
struct Fp8OfSglang {
    float scale, inverse;
    __device__ explicit Fp8OfSglang(float largest) : scale(product(largest, 1.0f / 448.0f)), inverse(0.0f) {
        if (scale != 0.0f) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    }
    __device__ uint32 operator()(float first, float second) const {
        return to_fp8(product(first, inverse), product(second, inverse));
    }
    static __device__ __forceinline__ float product(float x, float y) {
        float result;
        asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
        return result;
    }
};

template <typename Element>
__device__ __forceinline__ float scale_of(float largest, float half_range) {
    const float scale = rounded<Element>(__fdiv_rn(largest, half_range));
    return scale == 0.0f ? epsilon<Element>() : scale;
}

// Adding zero turns -0 to 0.
template <typename Element>
struct Fp8OfCompressedTensors {
    float scale;
    __device__ explicit Fp8OfCompressedTensors(float largest) : scale(scale_of<Element>(largest, 448.0f)) {}
    __device__ uint32 operator()(float first, float second) const { return to_fp8(scaled(first), scaled(second)); }
    __device__ float scaled(float x) const { return __fadd_rn(rounded<Element>(__fdiv_rn(x, scale)), 0.0f); }
};

template <typename Element>
struct Int8OfCompressedTensors {
    float scale;
    __device__ explicit Int8OfCompressedTensors(float largest) : scale(scale_of<Element>(largest, 127.5f)) {}
    __device__ uint32 operator()(float first, float second) const { return whole(first) | whole(second) << 8; }
    __device__ uint32 whole(float x) const {
        const int nearest = __float2int_rn(rounded<Element>(__fdiv_rn(x, scale)));
        return max(-128, min(127, nearest)) & 0xff;
    }
};

// As SGLang and vLLM quantise a whole matrix: what is no number, as of 0 with a scale of 0, has the greatest value.
struct Fp8OfWhole {
    float scale, inverse;
    __device__ explicit Fp8OfWhole(float largest)
        : scale(__fdiv_rn(largest, 448.0f)), inverse(__fdiv_rn(1.0f, scale)) {}
    __device__ uint32 operator()(float first, float second) const {
        return to_fp8(product(first, inverse), product(second, inverse));
    }
    static __device__ __forceinline__ float product(float x, float inverse) {
        const float result = __fmul_rn(x, inverse);
        return result == result ? result : 448.0f;
    }
};

// Elements as bits. Of two magnitudes, the greater has the greater bits; NaN is above all.
template <typename Element>
struct Bits {
    using Word = unsigned short;
    static __device__ __forceinline__ Element element(uint32 bits) { return {static_cast<Word>(bits)}; }
    // `most` and `lane` have two elements each.
    static __device__ __forceinline__ uint32 greatest(uint32 most, uint32 lane) {
        return __vmaxu2(most, lane & 0x7fff7fffu);
    }
    static __device__ __forceinline__ uint32 of_both(uint32 most) { return max(most & 0xffffu, most >> 16); }
};
template <>
struct Bits<float> {
    using Word = uint32;
    static __device__ __forceinline__ float element(uint32 bits) { return __uint_as_float(bits); }
    static __device__ __forceinline__ uint32 greatest(uint32 most, uint32 lane) {
        return max(most, lane & 0x7fffffffu);
    }
    static __device__ __forceinline__ uint32 of_both(uint32 most) { return most; }
};

template <int kNbytes>
struct Unit;
template <>
struct Unit<16> { using Type = uint4; };
template <>
struct Unit<8> { using Type = uint2; };
template <>
struct Unit<4> { using Type = uint32; };
template <>
struct Unit<2> { using Type = unsigned short; };
template <>
struct Unit<1> { using Type = unsigned char; };

// Neighbouring elements, which are loaded and stored together. As bits, since the compiler would give each
// element of 8 or 16 bits a register of its own.
template <typename Element, int kCount>
struct Few {
    static constexpr int kSize = sizeof(Element), kNbytes = kSize * kCount, kLanes = (kNbytes + 3) / 4;
    using Type = typename Unit<kNbytes>::Type;
    union {
        uint32 lanes[kLanes];
        Type unit;
    };

    __device__ __forceinline__ explicit Few(const Type& bits) : lanes{} { unit = bits; }
    __device__ __forceinline__ Few() : lanes{} {}
    __device__ __forceinline__ uint32 bits(int k) const { return lanes[k * kSize / 4] >> (8 * (k * kSize % 4)); }
};

// Parts of digests by factors in global memory. It serves work that mostly waits for other memory.
template <typename Word>
struct Factors {
    using In = Digest<Word, false>;
    const uint64* columns;
    const uint64* rows;

    // Returns the part of neighbouring elements, the first of which is word `index` of its tensor. Its rows
    // of words begin with a lane.
    template <typename Element, int kCount>
    __device__ __forceinline__ uint64 of_few(uint64 index, const Few<Element, kCount>& few) const {
        if constexpr (kCount == 1) {
            return of_word(index, few.lanes[0]);
        } else {
            constexpr int kLanes = Few<Element, kCount>::kLanes;
            const uint64* factors = columns + index % In::kColumns / In::kPerLane;
            uint64 low = 0, ones = 0;
            uint32 high = 0;
            if constexpr (kLanes == 1) {
                ones = __ldg(factors);
                In::add(low, high, ones, few.lanes[0]);
            }
#pragma unroll
            for (int k = 0; k + 1 < kLanes; k += 2) {
                const ulonglong2 pair = __ldg(reinterpret_cast<const ulonglong2*>(factors + k));
                ones += pair.x + pair.y;
                In::add(low, high, pair.x, few.lanes[k]);
                In::add(low, high, pair.y, few.lanes[k + 1]);
            }
            low += ones * In::kOnes + (static_cast<uint64>(high) << 32);
            return low * __ldg(rows + index / In::kColumns);
        }
    }

    __device__ __forceinline__ uint64 of_word(uint64 index, uint64 word) const {
        const uint32 column = index % In::kColumns;
        const uint64 factor = __ldg(columns + column / In::kPerLane)
                              << (column % In::kPerLane * (8 * sizeof(Word)));
        return factor * (word + 1) * __ldg(rows + index / In::kColumns);
    }
};

struct __align__(16) Matrix {
    int64 source, values, scales;  // addresses; all row-major, without gaps
    int64 rows, columns, block_rows, block_columns;
    int64 gap, scale_gap;  // elements, and scales, of the whole tensor between its rows
    int64 before, stored_before, scales_before;  // those before its first: of what comes, and of what is stored
    int64 of_source, of_values, of_scales;  // numbers of the digests that it adds to; -1: none
    int64 first;  // the number of its first block among those of all matrices
};

// A block of a matrix, as units of neighbouring elements.
template <typename Element, int kCount>
struct Block {
    static constexpr int kHeld = 8;  // units that a thread keeps in its registers
    using Neighbours = Few<Element, kCount>;
    const Matrix& matrix;
    int64 row, column;
    uint32 per_row, count;
    Divider row_of;

    // Block `number` in row-major order of the matrix's blocks, of which `across` are beside each other.
    __device__ __forceinline__ Block(const Matrix& of, uint32 number, int64 across)
        : matrix(of),
          row(number / across * of.block_rows),
          column(number % across * of.block_columns),
          per_row(static_cast<uint32>(min(of.block_columns, of.columns - column)) / kCount),
          count(static_cast<uint32>(min(of.block_rows, of.rows - row)) * per_row),
          row_of(per_row) {}
    __device__ __forceinline__ int64 place(uint32 i) const {
        const uint32 down = row_of(i);
        return (row + down) * matrix.columns + column + (i - down * per_row) * kCount;
    }
    __device__ __forceinline__ int64 gaps(uint32 i) const { return (row + row_of(i)) * matrix.gap; }
    __device__ __forceinline__ Neighbours load(uint32 i) const {
        const Element* source = reinterpret_cast<const Element*>(matrix.source) + place(i);
        return Neighbours(__ldcs(reinterpret_cast<const typename Neighbours::Type*>(source)));
    }
};

__device__ __forceinline__ int64 blocks_across(const Matrix& matrix) {
    return (matrix.columns - 1) / matrix.block_columns + 1;
}

// Quantises blocks, and adds up this thread's parts of the digests of what it reads and of what it makes.
template <typename Rule, typename Element>
struct Quantizer {
    Factors<typename Bits<Element>::Word> source_factors;
    Factors<unsigned char> value_factors;
    Factors<uint32> scale_factors;
    uint64* sources;  // digests of what comes
    uint64* totals;  // of what is stored
    uint32* largest;  // in shared memory: of this block, of the next and, maybe still read, of the last; zeros
    uint32 turn = 0;
    uint64 source_sum = 0, value_sum = 0;

    template <int kCount>
    __device__ __forceinline__ void make(
        const Matrix& matrix, int64 at, int64 gaps, const Rule& rule, const Few<Element, kCount>& few) {
        const auto element = [&](int k) { return k < kCount ? widened(Bits<Element>::element(few.bits(k))) : 0.0f; };
        Few<unsigned char, kCount> made;
#pragma unroll
        for (int k = 0; k < kCount; k += 2) made.lanes[k / 4] |= rule(element(k), element(k + 1)) << (8 * (k % 4));
        if constexpr (kCount == 1) made.lanes[0] &= 0xff;  // the other is of no element
        *reinterpret_cast<typename Few<unsigned char, kCount>::Type*>(matrix.values + at) = made.unit;
        const int64 index = at + gaps;
        if (matrix.of_source >= 0) source_sum += source_factors.of_few(matrix.before + index, few);
        if (matrix.of_values >= 0) value_sum += value_factors.of_few(matrix.stored_before + index, made);
    }

    __device__ __forceinline__ void put_scale(const Matrix& matrix, uint32 number, uint64 index, float scale) {
        reinterpret_cast<float*>(matrix.scales)[number] = scale;
        if (matrix.of_scales < 0) return;
        const uint64 part = scale_factors.of_word(matrix.scales_before + index, __float_as_uint(scale));
        atomicAdd(totals + matrix.of_scales, part);
    }

    __device__ __forceinline__ void begin(int64) {}

    // Quantises block `number` of a matrix to 8 bits an element, and its float32 scale.
    template <int kCount>
    __device__ __forceinline__ void block(const Matrix& matrix, uint32 number) {
        uint32 *now = largest + turn % 3, *next = largest + (turn + 1) % 3;
        ++turn;
        const int64 across = blocks_across(matrix);
        const Block<Element, kCount> its(matrix, number, across);
        uint32 most = 0;
        const auto look = [&](const Few<Element, kCount>& few) {
#pragma unroll
            for (int k = 0; k < few.kLanes; ++k) most = Bits<Element>::greatest(most, few.lanes[k]);
        };
        const uint32 i = threadIdx.x;
        Few<Element, kCount> held[its.kHeld];
#pragma unroll
        for (int k = 0; k < its.kHeld; ++k) held[k] = its.load(min(i + k * kQuantizers, its.count - 1));
#pragma unroll
        for (int k = 0; k < its.kHeld; ++k) look(held[k]);
        for (uint32 more = i + its.kHeld * kQuantizers; more < its.count; more += kQuantizers) look(its.load(more));
        most = __reduce_max_sync(0xffffffffu, Bits<Element>::of_both(most));
        if (i % 32 == 0) atomicMax(now, most);
        if (i == 0) *next = 0;
        __syncthreads();
        const Rule rule(widened(Bits<Element>::element(*now)));
#pragma unroll
        for (int k = 0; k < its.kHeld; ++k) {
            const uint32 nth = i + k * kQuantizers;
            if (nth < its.count) make(matrix, its.place(nth), its.gaps(nth), rule, held[k]);
        }
        for (uint32 more = i + its.kHeld * kQuantizers; more < its.count; more += kQuantizers) {
            make(matrix, its.place(more), its.gaps(more), rule, its.load(more));
        }
        if (i == 0) put_scale(matrix, number, number + number / across * matrix.scale_gap, rule.scale);
    }

    __device__ __forceinline__ void end(const Matrix& matrix) {
        if (matrix.of_source >= 0) add_warp(sources + matrix.of_source, source_sum);
        if (matrix.of_values >= 0) add_warp(totals + matrix.of_values, value_sum);
        source_sum = value_sum = 0;
    }
};

// Each thread block works on neighbouring blocks: mostly of one matrix, to whose digests it then adds once.
template <typename Element, typename Work>
__device__ __forceinline__ void each_block(
    const Matrix* matrices, int64 num_matrices, int64 num_blocks, Work& work) {
    constexpr int kCount = 16 / sizeof(Element);
    int64 number = num_blocks * blockIdx.x / gridDim.x;
    const int64 end = num_blocks * (blockIdx.x + 1) / gridDim.x;
    int64 low = 0, high = num_matrices;
    while (high - low > 1) {
        const int64 middle = (low + high) / 2;
        (matrices[middle].first <= number ? low : high) = middle;
    }
    for (; number < end; ++low) {
        const Matrix& matrix = matrices[low];
        const int64 last = low + 1 < num_matrices ? min(end, matrices[low + 1].first) : end;
        const int64 sizes = matrix.columns | matrix.block_columns | matrix.gap | matrix.before | matrix.stored_before;
        const int64 bits = matrix.source | sizes * sizeof(Element);
        const bool is_aligned = bits % 16 == 0 && matrix.values % kCount == 0;
        work.begin(low);
        for (; number < last; ++number) {
            if (is_aligned) {
                work.template block<kCount>(matrix, number - matrix.first);
            } else {
                work.template block<1>(matrix, number - matrix.first);
            }
        }
        work.end(matrix);
    }
}

#define QUANTIZE(name, Rule, Element)                                                                \
    extern "C" __global__ void __launch_bounds__(kQuantizers, 3) name(                               \
        const Matrix* matrices, int64 num_matrices, int64 num_blocks, const uint64* columns,         \
        const uint64* byte_columns, const uint64* word_columns, const uint64* rows, uint64* sources, \
        uint64* stored) {                                                                            \
        __shared__ uint32 largest[3];                                                                \
        if (threadIdx.x < 3) largest[threadIdx.x] = 0;                                               \
        __syncthreads();                                                                             \
        Quantizer<Rule<Element>, Element> quantizer{                                                 \
            {columns, rows}, {byte_columns, rows}, {word_columns, rows}, sources, stored, largest};  \
        each_block<Element>(matrices, num_matrices, num_blocks, quantizer);                          \
    }

#ifdef KERNEL_vllm_fp8_bfloat16
QUANTIZE(vllm_fp8_bfloat16, Fp8OfVllm, Bfloat16)
#endif
#ifdef KERNEL_vllm_fp8_float16
QUANTIZE(vllm_fp8_float16, Fp8OfVllm, Float16)
#endif
#ifdef KERNEL_vllm_fp8_float32
QUANTIZE(vllm_fp8_float32, Fp8OfVllm, float)
#endif
#ifdef KERNEL_sglang_fp8_bfloat16
QUANTIZE(sglang_fp8_bfloat16, Fp8OfSglang, Bfloat16)
#endif
#ifdef KERNEL_sglang_fp8_float16
QUANTIZE(sglang_fp8_float16, Fp8OfSglang, Float16)
#endif
#ifdef KERNEL_sglang_fp8_float32
QUANTIZE(sglang_fp8_float32, Fp8OfSglang, float)
#endif
#ifdef KERNEL_compressed_fp8_bfloat16
QUANTIZE(compressed_fp8_bfloat16, Fp8OfCompressedTensors, Bfloat16)
#endif
#ifdef KERNEL_compressed_fp8_float16
QUANTIZE(compressed_fp8_float16, Fp8OfCompressedTensors, Float16)
#endif
#ifdef KERNEL_compressed_fp8_float32
QUANTIZE(compressed_fp8_float32, Fp8OfCompressedTensors, float)
#endif
#ifdef KERNEL_compressed_int8_bfloat16
QUANTIZE(compressed_int8_bfloat16, Int8OfCompressedTensors, Bfloat16)
#endif
#ifdef KERNEL_compressed_int8_float16
QUANTIZE(compressed_int8_float16, Int8OfCompressedTensors, Float16)
#endif
#ifdef KERNEL_compressed_int8_float32
QUANTIZE(compressed_int8_float32, Int8OfCompressedTensors, float)
#endif

// The greatest magnitudes of matrices that share one scale with others. Each is read in blocks, by which the work
// is divided. `scale_of` has the number of each matrix's scale.
template <typename Element>
struct LargestOfShared {
    const uint32* scale_of;
    uint32* largest;  // as the bits of floats; NaN is none
    uint32* now = nullptr;
    float most = 0.0f;

    __device__ __forceinline__ void begin(int64 matrix) { now = largest + scale_of[matrix]; }

    // Calls take(number, unit) for each unit that this thread reads, too.
    template <int kCount, typename Take>
    __device__ __forceinline__ void look(const Block<Element, kCount>& its, Take take) {
        constexpr int kHeld = Block<Element, kCount>::kHeld;
        for (uint32 first = threadIdx.x; first < its.count; first += kHeld * kQuantizers) {
            Few<Element, kCount> held[kHeld];
#pragma unroll
            for (int k = 0; k < kHeld; ++k) held[k] = its.load(min(first + k * kQuantizers, its.count - 1));
#pragma unroll
            for (int k = 0; k < kHeld; ++k) {
#pragma unroll
                for (int each = 0; each < kCount; ++each) {
                    const float x = fabsf(widened(Bits<Element>::element(held[k].bits(each))));
                    if (x > most) most = x;
                }
                if (first + k * kQuantizers < its.count) take(first + k * kQuantizers, held[k]);
            }
        }
    }

    template <int kCount>
    __device__ __forceinline__ void block(const Matrix& matrix, uint32 number) {
        const Block<Element, kCount> its(matrix, number, blocks_across(matrix));
        look(its, [](uint32, const Few<Element, kCount>&) {});
    }

    __device__ __forceinline__ void end(const Matrix&) {
        const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
        if (threadIdx.x % 32 == 0) atomicMax(now, bits);
        most = 0.0f;
    }
};

// Makes the values by `largest`, and finds the greatest magnitudes of what it reads once more.
template <typename Element>
struct ValuesOfShared {
    Quantizer<Fp8OfWhole, Element> quantizer;
    const uint32* largest;
    LargestOfShared<Element> again;
    Fp8OfWhole rule{0.0f};

    __device__ __forceinline__ void begin(int64 matrix) {
        again.begin(matrix);
        rule = Fp8OfWhole(__uint_as_float(largest[again.scale_of[matrix]]));
    }

    template <int kCount>
    __device__ __forceinline__ void block(const Matrix& matrix, uint32 number) {
        const Block<Element, kCount> its(matrix, number, blocks_across(matrix));
        again.look(its, [&](uint32 nth, const Few<Element, kCount>& few) {
            quantizer.make(matrix, its.place(nth), its.gaps(nth), rule, few);
        });
        if (number == 0 && threadIdx.x == 0) quantizer.put_scale(matrix, 0, 0, rule.scale);
    }

    __device__ __forceinline__ void end(const Matrix& matrix) {
        again.end(matrix);
        quantizer.end(matrix);
    }
};

#define ONE_SCALE(name, Element)                                                                      \
    extern "C" __global__ void __launch_bounds__(kQuantizers, 4) shared_largest_##name(               \
        const Matrix* matrices, int64 num_matrices, int64 num_blocks, const uint32* scale_of,         \
        uint32* largest) {                                                                            \
        LargestOfShared<Element> work{scale_of, largest};                                             \
        each_block<Element>(matrices, num_matrices, num_blocks, work);                                \
    }                                                                                                 \
    extern "C" __global__ void __launch_bounds__(kQuantizers, 3) shared_values_##name(                \
        const Matrix* matrices, int64 num_matrices, int64 num_blocks, const uint32* scale_of,         \
        const uint32* largest, uint32* again, const uint64* columns, const uint64* byte_columns,      \
        const uint64* word_columns, const uint64* rows, uint64* sources, uint64* stored) {            \
        ValuesOfShared<Element> work{                                                                 \
            {{columns, rows}, {byte_columns, rows}, {word_columns, rows}, sources, stored, nullptr},  \
            largest, {scale_of, again}};                                                              \
        each_block<Element>(matrices, num_matrices, num_blocks, work);                                \
    }

#if defined(KERNEL_shared_largest_bfloat16) || defined(KERNEL_shared_values_bfloat16)
ONE_SCALE(bfloat16, Bfloat16)
#endif
#if defined(KERNEL_shared_largest_float16) || defined(KERNEL_shared_values_float16)
ONE_SCALE(float16, Float16)
#endif
#if defined(KERNEL_shared_largest_float32) || defined(KERNEL_shared_values_float32)
ONE_SCALE(float32, float)
#endif

// A matrix whose blocks share scales with those of others. A warp takes neighbouring parts: what one row has of
// one block.
struct Parts {
    int64 rows, columns, block_rows, block_columns;

    // Calls take(block, first element, number of elements) for each part of this warp.
    template <typename Take>
    __device__ __forceinline__ void each(Take take) const {
        const int64 across = (columns - 1) / block_columns + 1, count = rows * across;
        const int64 num_warps = static_cast<int64>(gridDim.x) * (kQuantizers / 32);
        const int64 warp = static_cast<int64>(blockIdx.x) * (kQuantizers / 32) + threadIdx.x / 32;
        const int64 end = count * (warp + 1) / num_warps;
        for (int64 part = count * warp / num_warps; part < end; ++part) {
            const int64 row = part / across, nth = part % across, column = nth * block_columns;
            take(row / block_rows * across + nth, row * columns + column, min(block_columns, columns - column));
        }
    }
};

// Raises the greatest magnitude of each block, as the bits of a float. NaN is none.
template <typename Element, int kCount>
__device__ __forceinline__ void raise_largest(const Element* source, const Parts& parts, uint32* largest) {
    using Neighbours = Few<Element, kCount>;
    const uint32 lane = threadIdx.x % 32;
    float most = 0.0f;
    int64 now = -1;
    const auto note = [&] {
        const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
        if (lane == 0 && now >= 0) atomicMax(largest + now, bits);
        most = 0.0f;
    };
    parts.each([&](int64 block, int64 first, int64 numel) {
        if (block != now) note();
        now = block;
        const auto* units = reinterpret_cast<const typename Neighbours::Type*>(source + first);
#pragma unroll 4
        for (int64 i = lane; i < numel / kCount; i += 32) {
            const Neighbours few(units[i]);
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                const float x = fabsf(widened(Bits<Element>::element(few.bits(k))));
                if (x > most) most = x;
            }
        }
    });
    note();
}

// Turns elements to float8 by the inverse of their block's scale. What is no number has the greatest value.
template <typename Element, int kCount>
__device__ __forceinline__ void scale_parts(
    const Element* source, const Parts& parts, const float* inverses, unsigned char* values) {
    using Neighbours = Few<Element, kCount>;
    using Bytes = Few<unsigned char, kCount>;
    parts.each([&](int64 block, int64 first, int64 numel) {
        const float inverse = inverses[block];
        const auto* units = reinterpret_cast<const typename Neighbours::Type*>(source + first);
        auto* targets = reinterpret_cast<typename Bytes::Type*>(values + first);
#pragma unroll 4
        for (int64 i = threadIdx.x % 32; i < numel / kCount; i += 32) {
            const Neighbours few(units[i]);
            const auto scaled = [&](int k) {
                return k < kCount ? Fp8OfWhole::product(widened(Bits<Element>::element(few.bits(k))), inverse) : 0.0f;
            };
            Bytes made;
#pragma unroll
            for (int k = 0; k < kCount; k += 2) made.lanes[k / 4] |= to_fp8(scaled(k), scaled(k + 1)) << (8 * (k % 4));
            targets[i] = made.unit;
        }
    });
}

template <typename Element>
__device__ __forceinline__ bool has_units(const Element* source, const Parts& parts, const void* values) {
    constexpr int kCount = 16 / sizeof(Element);
    const int64 sizes = (parts.columns | parts.block_columns) * sizeof(Element);
    return (reinterpret_cast<int64>(source) | sizes) % 16 == 0 && reinterpret_cast<int64>(values) % kCount == 0;
}

#define SHARE_SCALES(name, Element)                                                                   \
    extern "C" __global__ void __launch_bounds__(kQuantizers) largest_##name(                         \
        const Element* source, int64 rows, int64 columns, int64 block_rows, int64 block_columns,      \
        uint32* largest) {                                                                            \
        const Parts parts{rows, columns, block_rows, block_columns};                                  \
        if (has_units(source, parts, nullptr)) {                                                      \
            raise_largest<Element, 16 / sizeof(Element)>(source, parts, largest);                     \
        } else {                                                                                      \
            raise_largest<Element, 1>(source, parts, largest);                                        \
        }                                                                                             \
    }                                                                                                 \
    extern "C" __global__ void __launch_bounds__(kQuantizers) scaled_##name(                          \
        const Element* source, int64 rows, int64 columns, int64 block_rows, int64 block_columns,      \
        const float* inverses, unsigned char* values) {                                               \
        const Parts parts{rows, columns, block_rows, block_columns};                                  \
        if (has_units(source, parts, values)) {                                                       \
            scale_parts<Element, 16 / sizeof(Element)>(source, parts, inverses, values);              \
        } else {                                                                                      \
            scale_parts<Element, 1>(source, parts, inverses, values);                                 \
        }                                                                                             \
    }

#if defined(KERNEL_largest_bfloat16) || defined(KERNEL_scaled_bfloat16)
SHARE_SCALES(bfloat16, Bfloat16)
#endif
#if defined(KERNEL_largest_float16) || defined(KERNEL_scaled_float16)
SHARE_SCALES(float16, Float16)
#endif
#if defined(KERNEL_largest_float32) || defined(KERNEL_scaled_float32)
SHARE_SCALES(float32, float)
#endif

// Groups of a row's columns that share a scale, and values of 4 or 8 bits, packed in words. One kernel finds scales
// and zero points, another makes the words.

// The lesser and the greater of two numbers; NaN if one of them is.
__device__ __forceinline__ float lesser(float x, float y) { return x < y || x != x ? x : y; }
__device__ __forceinline__ float greater(float x, float y) { return x > y || x != x ? x : y; }

template <typename Element>
__device__ __forceinline__ float quotient(float x, float y) {
    return rounded<Element>(__fdiv_rn(x, y));
}

// The nearest integer in a range. NaN is taken for zero.
__device__ __forceinline__ int whole(float x, int least, int most) { return max(least, min(most, __float2int_rn(x))); }

__device__ __forceinline__ void put(Bfloat16& to, float x) { to.bits = __float_as_uint(x) >> 16; }
__device__ __forceinline__ void put(Float16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ __forceinline__ void put(float& to, float x) { to = x; }

// A group's scale, and the unsigned value that stands for zero. Each rule makes them of the least and the greatest
// number, as quantising/quantize.py and quantising/round_to_nearest.py have it.
template <int kNumBits>
struct Group {
    static constexpr int kBits = kNumBits, kPerWord = 32 / kBits, kHalf = 1 << (kBits - 1), kMost = 2 * kHalf - 1;
    float scale;
    int zero;
    // The place in a word of what the kth of neighbouring rows has.
    static __device__ __forceinline__ int place(int k) { return k; }
};

template <typename Element, int kBits>
struct GroupOfCompressedTensors : Group<kBits> {
    static constexpr bool kTransposed = false, kAlongRows = false;
    using Its = Group<kBits>;
    __device__ GroupOfCompressedTensors(float scale, int zero) : Its{scale, zero} {}
    static __device__ GroupOfCompressedTensors of(float least, float most, bool symmetric) {
        least = lesser(least, 0.0f);
        most = greater(most, 0.0f);
        int zero = 0;
        float scale;
        if (symmetric) {
            scale = quotient<Element>(greater(fabsf(least), most), 0.5f * Its::kMost);
        } else {
            scale = quotient<Element>(rounded<Element>(__fsub_rn(most, least)), Its::kMost);
            const float shift = rounded<Element>(__fsub_rn(-Its::kHalf, quotient<Element>(least, scale)));
            zero = whole(shift, -Its::kHalf, Its::kHalf - 1);
        }
        return {scale == 0.0f ? epsilon<Element>() : scale, zero + Its::kHalf};
    }
    __device__ uint32 value(float x) const {
        const float shifted = rounded<Element>(__fadd_rn(quotient<Element>(x, Its::scale), Its::zero - Its::kHalf));
        return whole(shifted, -Its::kHalf, Its::kHalf - 1) + Its::kHalf;
    }
};

template <typename Element, int kBits>
struct GroupOfGptq : Group<kBits> {
    static constexpr bool kTransposed = true, kAlongRows = false;
    using Its = Group<kBits>;
    __device__ GroupOfGptq(float scale, int zero) : Its{scale, zero} {}
    static __device__ GroupOfGptq of(float least, float most, bool) {
        const float above = fabsf(quotient<Element>(most, Its::kHalf - 1));
        const float scale = greater(above, fabsf(quotient<Element>(least, -Its::kHalf)));
        return {scale == 0.0f ? epsilon<Element>() : scale, Its::kHalf};
    }
    __device__ uint32 value(float x) const {
        const int steps = whole(quotient<Element>(x, Its::scale), -Its::kMost, Its::kMost);
        return max(0, min(Its::kMost, steps + Its::zero));
    }
};

template <typename Element, int kBits>
struct GroupOfAwq : GroupOfGptq<Element, kBits> {
    static constexpr bool kAlongRows = true;
    using Its = Group<kBits>;
    __device__ GroupOfAwq(float scale, int zero) : GroupOfGptq<Element, kBits>(scale, zero) {}
    static __device__ GroupOfAwq of(float least, float most, bool) {
        least = lesser(least, 0.0f);
        const float range = rounded<Element>(__fsub_rn(greater(most, 0.0f), least));
        const float scale = quotient<Element>(greater(range, rounded<Element>(1e-5f)), Its::kMost);
        return {scale, whole(fabsf(quotient<Element>(least, scale)), 0, Its::kMost)};
    }
    static __device__ __forceinline__ int place(int k) { return k / 2 + k % 2 * 4; }
};

// A matrix whose groups divide its columns. If zero_points is null, all groups have the rule's own.
template <typename Rule, typename Element>
struct Grouped {
    const Element* source;
    int64 rows, columns, group, across;  // across: groups of a row
    Element* scales;
    uint32* zero_points;

    // Where scales are stored; or zero points, by words of rows.
    __device__ __forceinline__ int64 place(int64 row, int64 nth, int64 num_rows) const {
        return Rule::kTransposed ? nth * num_rows + row : row * across + nth;
    }
    __device__ __forceinline__ uint32& zeros(int64 row, int64 nth) const {
        return zero_points[place(row / Rule::kPerWord, nth, rows / Rule::kPerWord)];
    }
    __device__ __forceinline__ Rule of(int64 row, int64 nth) const {
        int zero = Rule::kHalf;
        if (zero_points) {
            const int shift = Rule::kBits * Rule::place(row % Rule::kPerWord);
            zero = zeros(row, nth) >> shift & Rule::kMost;
        }
        return {widened(scales[place(row, nth, rows)]), zero};
    }
    template <int kCount>
    __device__ __forceinline__ bool has_units() const {
        constexpr int kNbytes = kCount * sizeof(Element);
        return ((columns | group) * sizeof(Element) | reinterpret_cast<int64>(source)) % kNbytes == 0;
    }
};

constexpr int kStrip = kQuantizers / 32;  // rows of a block that finds scales: one for each warp
constexpr int kChunk = 32;  // groups of such a row; both are in weightsync/quantising/group_kernels.py, too

// Finds the scales of a block's groups, and packs their zero points. Neighbouring lanes look at one group.
template <int kCount, typename Rule, typename Element>
__device__ __forceinline__ void find_scales(const Grouped<Rule, Element>& matrix, unsigned char (*zeros)[kStrip]) {
    using Neighbours = Few<Element, kCount>;
    const uint32 num_units = matrix.group / kCount, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32 lanes = 1;
    while (lanes < 32 && lanes < num_units) lanes *= 2;
    const uint32 chunks = (matrix.across - 1) / kChunk + 1;
    const int64 top = blockIdx.x / chunks * kStrip, row = top + warp, first = blockIdx.x % chunks * kChunk;
    for (uint32 nth = lane / lanes; nth < kChunk; nth += 32 / lanes) {
        const bool is_inside = row < matrix.rows && first + nth < matrix.across;
        float least = __uint_as_float(0x7f800000u), most = -least;
        if (is_inside) {
            const Element* source = matrix.source + row * matrix.columns + (first + nth) * matrix.group;
            const auto* units = reinterpret_cast<const typename Neighbours::Type*>(source);
#pragma unroll 4
            for (uint32 i = lane % lanes; i < num_units; i += lanes) {
                const Neighbours few(units[i]);
#pragma unroll
                for (int k = 0; k < kCount; ++k) {
                    const float x = widened(Bits<Element>::element(few.bits(k)));
                    least = lesser(least, x);
                    most = greater(most, x);
                }
            }
        }
        for (uint32 apart = lanes / 2; apart > 0; apart /= 2) {
            least = lesser(least, __shfl_xor_sync(0xffffffffu, least, apart));
            most = greater(most, __shfl_xor_sync(0xffffffffu, most, apart));
        }
        if (lane % lanes == 0) {
            const Rule its = Rule::of(least, most, matrix.zero_points == nullptr);
            if (is_inside) put(matrix.scales[matrix.place(row, first + nth, matrix.rows)], its.scale);
            zeros[nth][warp] = is_inside ? its.zero : 0;
        }
    }
    if (!matrix.zero_points) return;
    __syncthreads();
    const uint32 nth = threadIdx.x % kChunk, word = threadIdx.x / kChunk * Rule::kPerWord;
    if (word >= kStrip || top + word >= matrix.rows || first + nth >= matrix.across) return;
    uint32 packed = 0;
#pragma unroll
    for (int k = 0; k < Rule::kPerWord; ++k) {
        packed |= static_cast<uint32>(zeros[nth][word + k]) << (Rule::kBits * Rule::place(k));
    }
    matrix.zeros(top + word, first + nth) = packed;
}

constexpr int kTileRows = 64, kTileColumns = 128;  // `_TILE` in weightsync/quantising/group_kernels.py

// Makes the words of a tile. Each holds neighbouring columns of a row, of one group.
template <int kCount, typename Rule, typename Element>
__device__ __forceinline__ void pack_columns(const Grouped<Rule, Element>& matrix, uint32* words, uint32* shared) {
    using Neighbours = Few<Element, kCount>;
    constexpr int kAcross = kTileColumns / Rule::kPerWord, kPitch = kTileRows + 1;
    const int64 num_words = (matrix.columns - 1) / Rule::kPerWord + 1;
    const uint32 tiles = (num_words - 1) / kAcross + 1;
    const int64 top = blockIdx.x / tiles * kTileRows, left = blockIdx.x % tiles * kAcross;
    for (uint32 i = threadIdx.x; i < kTileRows * kAcross; i += kQuantizers) {
        const int64 row = top + i / kAcross, nth = left + i % kAcross, column = nth * Rule::kPerWord;
        if (row >= matrix.rows || nth >= num_words) continue;
        const Rule its = matrix.of(row, static_cast<uint32>(column) / static_cast<uint32>(matrix.group));
        const Element* source = matrix.source + row * matrix.columns + column;
        uint32 word = 0;
#pragma unroll
        for (int k = 0; k < Rule::kPerWord; k += kCount) {
            if (column + k >= matrix.columns) break;
            const Neighbours few(*reinterpret_cast<const typename Neighbours::Type*>(source + k));
#pragma unroll
            for (int each = 0; each < kCount; ++each) {
                const float x = widened(Bits<Element>::element(few.bits(each)));
                word |= its.value(x) << (Rule::kBits * (k + each));
            }
        }
        if constexpr (Rule::kTransposed) {
            shared[i % kAcross * kPitch + i / kAcross] = word;
        } else {
            words[row * num_words + nth] = word;
        }
    }
    if constexpr (Rule::kTransposed) {
        __syncthreads();
        for (uint32 i = threadIdx.x; i < kTileRows * kAcross; i += kQuantizers) {
            const int64 row = top + i % kTileRows, nth = left + i / kTileRows;
            if (row >= matrix.rows || nth >= num_words) continue;
            words[nth * matrix.rows + row] = shared[i / kTileRows * kPitch + i % kTileRows];
        }
    }
}

// The same for words that hold neighbouring rows of a column. They divide the rows.
template <typename Rule, typename Element>
__device__ __forceinline__ void pack_rows(const Grouped<Rule, Element>& matrix, uint32* words, uint32* shared) {
    constexpr int kDown = kTileRows / Rule::kPerWord, kPitch = kDown + 1;
    const int64 num_words = matrix.rows / Rule::kPerWord;
    const uint32 tiles = (matrix.columns - 1) / kTileColumns + 1;
    const int64 top = blockIdx.x / tiles * kDown, left = blockIdx.x % tiles * kTileColumns;
    for (uint32 i = threadIdx.x; i < kTileColumns * kDown; i += kQuantizers) {
        const int64 nth = top + i / kTileColumns, column = left + i % kTileColumns, row = nth * Rule::kPerWord;
        if (nth >= num_words || column >= matrix.columns) continue;
        const uint32 group = static_cast<uint32>(column) / static_cast<uint32>(matrix.group);
        uint32 word = 0;
#pragma unroll
        for (int k = 0; k < Rule::kPerWord; ++k) {
            const float x = widened(matrix.source[(row + k) * matrix.columns + column]);
            word |= matrix.of(row + k, group).value(x) << (Rule::kBits * Rule::place(k));
        }
        shared[i % kTileColumns * kPitch + i / kTileColumns] = word;
    }
    __syncthreads();
    for (uint32 i = threadIdx.x; i < kTileColumns * kDown; i += kQuantizers) {
        const int64 nth = top + i % kDown, column = left + i / kDown;
        if (nth >= num_words || column >= matrix.columns) continue;
        words[column * num_words + nth] = shared[i / kDown * kPitch + i % kDown];
    }
}

template <typename Rule, typename Element>
__device__ __forceinline__ void pack_tile(const Grouped<Rule, Element>& matrix, uint32* words, uint32* shared) {
    constexpr int kMost = 16 / sizeof(Element), kCount = kMost < Rule::kPerWord ? kMost : Rule::kPerWord;
    if constexpr (Rule::kAlongRows) {
        pack_rows(matrix, words, shared);
    } else if (matrix.template has_units<kCount>()) {
        pack_columns<kCount>(matrix, words, shared);
    } else {
        pack_columns<1>(matrix, words, shared);
    }
}

#define PACK_GROUPS(rule, Rule, kBits, dtype, Element)                                                    \
    extern "C" __global__ void __launch_bounds__(kQuantizers, 6) rule##_scales_int##kBits##_##dtype(      \
        const Element* source, int64 rows, int64 columns, int64 group, Element* scales,                   \
        uint32* zero_points) {                                                                            \
        __shared__ unsigned char zeros[kChunk][kStrip];                                                   \
        const Grouped<Rule<Element, kBits>, Element> matrix{                                              \
            source, rows, columns, group, columns / group, scales, zero_points};                          \
        constexpr int kCount = 16 / sizeof(Element);                                                      \
        if (matrix.has_units<kCount>()) {                                                                 \
            find_scales<kCount>(matrix, zeros);                                                           \
        } else {                                                                                          \
            find_scales<1>(matrix, zeros);                                                                \
        }                                                                                                 \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(kQuantizers) rule##_words_int##kBits##_##dtype(          \
        const Element* source, int64 rows, int64 columns, int64 group, Element* scales,                   \
        uint32* zero_points, uint32* words) {                                                             \
        __shared__ uint32 shared[kTileColumns * kTileRows * kBits / 32 + kTileColumns];                   \
        const Grouped<Rule<Element, kBits>, Element> matrix{                                              \
            source, rows, columns, group, columns / group, scales, zero_points};                          \
        pack_tile(matrix, words, shared);                                                                 \
    }

#if defined(KERNEL_compressed_scales_int4_bfloat16) || defined(KERNEL_compressed_words_int4_bfloat16)
PACK_GROUPS(compressed, GroupOfCompressedTensors, 4, bfloat16, Bfloat16)
#endif
#if defined(KERNEL_compressed_scales_int4_float16) || defined(KERNEL_compressed_words_int4_float16)
PACK_GROUPS(compressed, GroupOfCompressedTensors, 4, float16, Float16)
#endif
#if defined(KERNEL_compressed_scales_int4_float32) || defined(KERNEL_compressed_words_int4_float32)
PACK_GROUPS(compressed, GroupOfCompressedTensors, 4, float32, float)
#endif
#if defined(KERNEL_compressed_scales_int8_bfloat16) || defined(KERNEL_compressed_words_int8_bfloat16)
PACK_GROUPS(compressed, GroupOfCompressedTensors, 8, bfloat16, Bfloat16)
#endif
#if defined(KERNEL_compressed_scales_int8_float16) || defined(KERNEL_compressed_words_int8_float16)
PACK_GROUPS(compressed, GroupOfCompressedTensors, 8, float16, Float16)
#endif
#if defined(KERNEL_compressed_scales_int8_float32) || defined(KERNEL_compressed_words_int8_float32)
PACK_GROUPS(compressed, GroupOfCompressedTensors, 8, float32, float)
#endif
#if defined(KERNEL_gptq_scales_int4_bfloat16) || defined(KERNEL_gptq_words_int4_bfloat16)
PACK_GROUPS(gptq, GroupOfGptq, 4, bfloat16, Bfloat16)
#endif
#if defined(KERNEL_gptq_scales_int4_float16) || defined(KERNEL_gptq_words_int4_float16)
PACK_GROUPS(gptq, GroupOfGptq, 4, float16, Float16)
#endif
#if defined(KERNEL_gptq_scales_int4_float32) || defined(KERNEL_gptq_words_int4_float32)
PACK_GROUPS(gptq, GroupOfGptq, 4, float32, float)
#endif
#if defined(KERNEL_gptq_scales_int8_bfloat16) || defined(KERNEL_gptq_words_int8_bfloat16)
PACK_GROUPS(gptq, GroupOfGptq, 8, bfloat16, Bfloat16)
#endif
#if defined(KERNEL_gptq_scales_int8_float16) || defined(KERNEL_gptq_words_int8_float16)
PACK_GROUPS(gptq, GroupOfGptq, 8, float16, Float16)
#endif
#if defined(KERNEL_gptq_scales_int8_float32) || defined(KERNEL_gptq_words_int8_float32)
PACK_GROUPS(gptq, GroupOfGptq, 8, float32, float)
#endif
#if defined(KERNEL_awq_scales_int4_bfloat16) || defined(KERNEL_awq_words_int4_bfloat16)
PACK_GROUPS(awq, GroupOfAwq, 4, bfloat16, Bfloat16)
#endif
#if defined(KERNEL_awq_scales_int4_float16) || defined(KERNEL_awq_words_int4_float16)
PACK_GROUPS(awq, GroupOfAwq, 4, float16, Float16)
#endif
#if defined(KERNEL_awq_scales_int4_float32) || defined(KERNEL_awq_words_int4_float32)
PACK_GROUPS(awq, GroupOfAwq, 4, float32, float)
#endif

// What changed between two versions of some memory, by weightsync/deltas/tiles.py. A block takes one tile, and has
// the tile's changed elements as bits in shared memory: the lowest bit of a word is the word's first element.
constexpr int kTileWords = (1 << 16) / 32;  // TILE in weightsync/deltas/tiles.py
constexpr int kOwnWords = kTileWords / kThreads;  // neighbouring words that a thread counts
constexpr int kEscape = 255;
enum ChangeCode { kNothing, kRuns, kGaps, kBitmap, kDense };

struct __align__(16) ChangeTile {
    int64 at;  // of the first byte, from where the memory begins
    uint32 num, width;  // elements, and bytes per element
};

template <typename Element>
struct __align__(sizeof(Element) < 2 ? 8 : 16) Eight {
    Element each[8];
};

// Copies one element. Units are single bytes if elements are not aligned.
template <int kWidth, typename Unit>
__device__ __forceinline__ void copy_element(char* to, const char* from) {
#pragma unroll
    for (int k = 0; k < kWidth / sizeof(Unit); ++k) {
        reinterpret_cast<Unit*>(to)[k] = reinterpret_cast<const Unit*>(from)[k];
    }
}

template <typename Element>
__device__ __forceinline__ void mark_changes(const char* old, const char* now, uint32 num, uint32* words) {
    constexpr int kSize = sizeof(Element), kLoads = kSize > 4 ? 1 : kSize > 2 ? 2 : 4;
    unsigned char* bytes = reinterpret_cast<unsigned char*>(words);
    const uint32 count = (reinterpret_cast<uint64>(old) | reinterpret_cast<uint64>(now)) % 16 ? 0 : num / 8;
    const Eight<Element>* before = reinterpret_cast<const Eight<Element>*>(old);
    const Eight<Element>* after = reinterpret_cast<const Eight<Element>*>(now);
#pragma unroll 1
    for (uint32 start = threadIdx.x; start < count; start += kThreads * kLoads) {
        Eight<Element> a[kLoads], b[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
            const uint32 i = min(start + k * kThreads, count - 1);
            a[k] = before[i];
            b[k] = after[i];
        }
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
            uint32 bits = 0;
#pragma unroll
            for (int e = 0; e < 8; ++e) bits |= static_cast<uint32>(a[k].each[e] != b[k].each[e]) << e;
            if (start + k * kThreads < count) bytes[start + k * kThreads] = bits;
        }
    }
#pragma unroll 1
    for (uint32 i = count + threadIdx.x; i < kTileWords * 4; i += kThreads) {
        uint32 bits = 0;
        for (uint32 at = i * 8 * kSize; at < min(i * 8 + 8, num) * kSize; ++at) {
            bits |= static_cast<uint32>(old[at] != now[at]) << (at / kSize - i * 8);
        }
        bytes[i] = bits;
    }
}

// Returns the place after the last changed element before a word.
__device__ __forceinline__ uint32 after_last(const uint32* words, int word) {
    while (--word >= 0) {
        if (words[word]) return 32 * word + 32 - __clz(words[word]);
    }
    return 0;
}

__device__ __forceinline__ uint32 run_starts(const uint32* words, int word) {
    return words[word] & ~(words[word] << 1 | (word ? words[word - 1] >> 31 : 0));
}

__device__ __forceinline__ uint32 run_ends(const uint32* words, int word) {
    return words[word] & ~(words[word] >> 1 | (word + 1 < kTileWords ? words[word + 1] << 31 : 0));
}

// Numbers of changed elements, of runs of them, and of escapes in gaps before them. Packed, one addition adds all.
struct Tally {
    uint32 count = 0, runs = 0, escapes = 0;

    static __device__ __forceinline__ Tally own(const uint32* words) {
        Tally tally;
#pragma unroll 1
        for (int word = threadIdx.x * kOwnWords; word < (threadIdx.x + 1) * kOwnWords; ++word) {
            if (!words[word]) continue;
            tally.count += __popc(words[word]);
            tally.runs += __popc(run_starts(words, word));
            tally.escapes += (32 * word + __ffs(words[word]) - 1 - after_last(words, word)) / kEscape;
        }
        return tally;
    }

    __device__ __forceinline__ uint64 packed() const {
        return count | static_cast<uint64>(runs) << 20 | static_cast<uint64>(escapes) << 40;
    }

    static __device__ __forceinline__ Tally unpacked(uint64 sum) {
        Tally tally;
        tally.count = sum & 0xfffff;
        tally.runs = sum >> 20 & 0xfffff;
        tally.escapes = sum >> 40;
        return tally;
    }
};

// Returns the sum of all earlier threads' numbers; `total` is the sum of all.
__device__ __forceinline__ uint64 sum_before(uint64 own, uint64* sums, uint64& total) {
    sums[threadIdx.x] = own;
    __syncthreads();
#pragma unroll 1
    for (int step = 1; step < kThreads; step *= 2) {
        const uint64 other = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    total = sums[kThreads - 1];
    const uint64 before = sums[threadIdx.x] - own;
    __syncthreads();
    return before;
}

// The bits of all elements of a tile in one word.
__device__ __forceinline__ uint32 all_of(uint32 word, uint32 num) {
    return num >= 32 * word + 32 ? ~0u : num > 32 * word ? (1u << (num - 32 * word)) - 1 : 0;
}

// Sets how many changed elements come before each word.
__device__ __forceinline__ void rank_words(const uint32* words, uint32 before, unsigned short* ranks) {
    for (int word = threadIdx.x * kOwnWords; word < (threadIdx.x + 1) * kOwnWords; ++word) {
        ranks[word] = before;
        before += __popc(words[word]);
    }
}

// Moves the changed elements of a tile to neighbouring values, or with kBack from there to their places.
template <int kWidth, typename Unit, bool kBack>
__device__ __forceinline__ void move_changed(
    const uint32* words, const unsigned short* ranks, uint32 num, char* tile, char* values) {
    const uint32 lane = threadIdx.x % 32;
#pragma unroll 4
    for (uint32 word = threadIdx.x / 32; word < (num + 31) / 32; word += kThreads / 32) {
        const uint32 bits = words[word];
        if (!(bits >> lane & 1)) continue;
        char* value = values + (ranks[word] + __popc(bits & ((1u << lane) - 1))) * kWidth;
        char* place = tile + (32 * word + lane) * kWidth;
        copy_element<kWidth, Unit>(kBack ? place : value, kBack ? value : place);
    }
}

template <typename Element, bool kBack>
__device__ __forceinline__ void move_elements(
    const uint32* words, const unsigned short* ranks, uint32 num, char* tile, char* values) {
    constexpr int kWidth = sizeof(Element);
    if ((reinterpret_cast<uint64>(tile) | reinterpret_cast<uint64>(values)) % kWidth == 0) {
        move_changed<kWidth, Element, kBack>(words, ranks, num, tile, values);
    } else {
        move_changed<kWidth, unsigned char, kBack>(words, ranks, num, tile, values);
    }
}

template <bool kBack>
__device__ __forceinline__ void move_values(
    const uint32* words, const unsigned short* ranks, const ChangeTile& tile, char* memory, char* values) {
    char* first = memory + tile.at;
    if (tile.width == 1) move_elements<unsigned char, kBack>(words, ranks, tile.num, first, values);
    if (tile.width == 2) move_elements<unsigned short, kBack>(words, ranks, tile.num, first, values);
    if (tile.width == 4) move_elements<uint32, kBack>(words, ranks, tile.num, first, values);
    if (tile.width == 8) move_elements<uint64, kBack>(words, ranks, tile.num, first, values);
}

__device__ __forceinline__ uint32 get_pair(const unsigned char* index, uint32 nth) {
    return index[2 * nth] | index[2 * nth + 1] << 8;
}

__device__ __forceinline__ void set_pair(unsigned char* index, uint32 nth, uint32 number) {
    index[2 * nth] = number;
    index[2 * nth + 1] = number >> 8;
}

#ifdef KERNEL_find_changes
// Finds each tile's code, number of values, bytes of the index and bytes of the values, a row of `found` each.
extern "C" __global__ void __launch_bounds__(kThreads, 2) find_changes(
    const ChangeTile* tiles, int64 num_tiles, const char* old, const char* now, int64* found, uint32* bits) {
    __shared__ __align__(16) uint32 words[kTileWords];
    __shared__ uint64 sums[kThreads];
    const int64 i = blockIdx.x;
    const ChangeTile tile = tiles[i];
    const char *before = old + tile.at, *after = now + tile.at;
    if (tile.width == 1) mark_changes<unsigned char>(before, after, tile.num, words);
    if (tile.width == 2) mark_changes<unsigned short>(before, after, tile.num, words);
    if (tile.width == 4) mark_changes<uint32>(before, after, tile.num, words);
    if (tile.width == 8) mark_changes<uint64>(before, after, tile.num, words);
    __syncthreads();
    for (int word = threadIdx.x; word < kTileWords; word += kThreads) bits[i * kTileWords + word] = words[word];
    uint64 total;
    sum_before(Tally::own(words).packed(), sums, total);
    if (threadIdx.x) return;
    const Tally all = Tally::unpacked(total);
    const uint32 bitmap = (tile.num + 7) / 8;
    uint32 code = kRuns, size = 4 * all.runs, count = all.count;
    if (count == 0 || count == tile.num) {
        code = count ? kDense : kNothing;
        size = 0;
    } else if (8 * count > tile.num && 32 * (all.runs - (words[0] & 1)) > tile.num) {
        code = kBitmap;  // as `difference` does, even if another code is as short
        size = bitmap;
    } else {
        if (count + all.escapes < size) {
            code = kGaps;
            size = count + all.escapes;
        }
        if (bitmap < size) {
            code = kBitmap;
            size = bitmap;
        }
    }
    if (size + count * tile.width >= tile.num * tile.width) {
        code = kDense;
        size = 0;
        count = tile.num;
    }
    found[i] = code;
    found[num_tiles + i] = count;
    found[2 * num_tiles + i] = size;
    found[3 * num_tiles + i] = static_cast<int64>(count) * tile.width;
}
#endif

#ifdef KERNEL_write_changes
// Writes what `find_changes` found. `ends`: where each tile's index and values end, a row each.
extern "C" __global__ void __launch_bounds__(kThreads, 2) write_changes(
    const ChangeTile* tiles, int64 num_tiles, char* now, const int64* found, const int64* ends, const uint32* bits,
    unsigned char* index, char* values) {
    __shared__ uint32 words[kTileWords];
    __shared__ unsigned short ranks[kTileWords];
    __shared__ uint64 sums[kThreads];
    const int64 i = blockIdx.x, code = found[i];
    const ChangeTile tile = tiles[i];
    if (code == kNothing) return;
    for (int word = threadIdx.x; word < kTileWords; word += kThreads) {
        words[word] = code == kDense ? all_of(word, tile.num) : bits[i * kTileWords + word];
    }
    __syncthreads();
    uint64 total;
    const Tally before = Tally::unpacked(sum_before(Tally::own(words).packed(), sums, total));
    rank_words(words, before.count, ranks);
    index += ends[i] - found[2 * num_tiles + i];
    values += ends[num_tiles + i] - found[3 * num_tiles + i];
    const int first = threadIdx.x * kOwnWords, end = first + kOwnWords;
    if (code == kRuns) {
        uint32 run = before.runs;
        for (int word = first; word < end; ++word) {
            for (uint32 left = run_starts(words, word); left; left &= left - 1) {
                set_pair(index, run++, 32 * word + __ffs(left) - 1);
            }
        }
        __syncthreads();
        run = before.runs;
        for (int word = first; word < end; ++word) {
            const uint32 starts = run_starts(words, word);
            for (uint32 left = run_ends(words, word); left; left &= left - 1) {
                const uint32 at = __ffs(left) - 1, nth = run + __popc(starts & ((2u << at) - 1)) - 1;
                set_pair(index, Tally::unpacked(total).runs + nth, 32 * word + at - get_pair(index, nth));
            }
            run += __popc(starts);
        }
    } else if (code == kGaps) {
        uint32 at = before.count + before.escapes, next = after_last(words, first);
        for (int word = first; word < end; ++word) {
            for (uint32 left = words[word]; left; left &= left - 1) {
                const uint32 place = 32 * word + __ffs(left) - 1;
                for (; place - next >= kEscape; next += kEscape) index[at++] = kEscape;
                index[at++] = place - next;
                next = place + 1;
            }
        }
    } else if (code == kBitmap) {
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(words);
        for (uint32 at = threadIdx.x; at < (tile.num + 7) / 8; at += kThreads) index[at] = __brev(bytes[at]) >> 24;
    }
    __syncthreads();
    move_values<false>(words, ranks, tile, now, values);
}
#endif

#ifdef KERNEL_apply_changes
// Writes values to their places. Of a damaged tile nothing is written, and `damaged` becomes its code and one.
// Rows of `table`, `row` numbers apart: a tile's code, number of values, bytes of the index, and where index and
// values begin.
extern "C" __global__ void __launch_bounds__(kThreads, 2) apply_changes(
    const ChangeTile* tiles, int64 row, const int64* table, char* memory, const unsigned char* index, char* values,
    int64* damaged) {
    constexpr uint32 kBytes = 16;  // of an index of gaps, of each thread
    __shared__ uint32 words[kTileWords];
    __shared__ unsigned short ranks[kTileWords];
    __shared__ uint64 sums[kThreads];
    __shared__ uint32 wrong;
    const int64 i = blockIdx.x, code = table[i];
    const ChangeTile tile = tiles[i];
    const uint32 count = table[row + i], size = table[2 * row + i], num = tile.num;
    if (code == kNothing && !count) return;
    index += table[3 * row + i];
    values += table[4 * row + i];
    if (threadIdx.x == 0) wrong = (code == kBitmap && size != (num + 7) / 8) || (code == kRuns && size % 4);
    for (int word = threadIdx.x; word < kTileWords; word += kThreads) {
        words[word] = code == kDense ? all_of(word, num) : 0;
    }
    __syncthreads();
    uint64 total;
    if (code == kRuns) {
        for (uint32 run = threadIdx.x; run < size / 4; run += kThreads) {
            const uint32 first = get_pair(index, run), last = first + get_pair(index, size / 4 + run);
            const uint32 before = run ? get_pair(index, run - 1) + get_pair(index, size / 4 + run - 1) : 0;
            if (last >= num || (run && first <= before)) {
                wrong = 1;
                continue;
            }
            for (uint32 word = first / 32; word <= last / 32; ++word) {
                const uint32 from = word == first / 32 ? ~0u << first % 32 : ~0u;
                atomicOr(words + word, from & (word == last / 32 ? ~0u >> (31 - last % 32) : ~0u));
            }
        }
    } else if (code == kGaps) {
        uint64 passed = 0;  // places before this turn's bytes
        for (uint32 turn = 0; turn < size && passed <= num; turn += kThreads * kBytes) {
            const uint32 first = turn + threadIdx.x * kBytes, end = min(first + kBytes, size);
            uint32 own = 0;
            for (uint32 at = first; at < end; ++at) own += index[at] == kEscape ? kEscape : index[at] + 1;
            uint64 place = passed + sum_before(own, sums, total);
            for (uint32 at = first; at < end; ++at) {
                place += index[at];
                if (index[at] == kEscape) continue;
                if (place < num) atomicOr(words + place / 32, 1u << place % 32);
                ++place;
            }
            passed += total;
        }
        if (passed > num) wrong = 1;
    } else if (code == kBitmap) {
        unsigned char* bytes = reinterpret_cast<unsigned char*>(words);
        for (uint32 at = threadIdx.x; at < min(size, (num + 7) / 8); at += kThreads) {
            bytes[at] = __brev(index[at]) >> 24 & (num - at * 8 >= 8 ? 0xffu : (1u << (num - at * 8)) - 1);
        }
    }
    __syncthreads();
    uint32 own = 0;
    for (int word = threadIdx.x * kOwnWords; word < (threadIdx.x + 1) * kOwnWords; ++word) own += __popc(words[word]);
    rank_words(words, sum_before(own, sums, total), ranks);
    __syncthreads();
    if (wrong || total != count) {
        if (threadIdx.x == 0) *damaged = 1 + code;
        return;
    }
    move_values<true>(words, ranks, tile, memory, values);
}
#endif
