//! The few offsets that the worker reads by itself, against every measured release.

use nvguest_abi::store::Store;

/// What `worker/` and `marshal/{register,control}.rs` read and write: escape, field as NVIDIA
/// names it, offset, bytes.
const READ: [(&str, &str, u32, u32); 82] = [
    ("NV_ESC_RM_ALLOC_MEMORY", "params.hRoot", 0, 4),
    ("NV_ESC_RM_ALLOC_MEMORY", "params.hObjectParent", 4, 4),
    ("NV_ESC_RM_ALLOC_MEMORY", "params.hObjectNew", 8, 4),
    ("NV_ESC_RM_FREE", "hRoot", 0, 4),
    ("NV_ESC_RM_FREE", "hObjectOld", 8, 4),
    ("NV_ESC_RM_ALLOC", "hRoot", 0, 4),
    ("NV_ESC_RM_ALLOC", "hObjectParent", 4, 4),
    ("NV_ESC_RM_ALLOC", "hObjectNew", 8, 4),
    ("NV_ESC_RM_ALLOC", "hClass", 0xc, 4),
    ("NV_ESC_RM_DUP_OBJECT", "hClient", 0, 4),
    ("NV_ESC_RM_DUP_OBJECT", "hParent", 4, 4),
    ("NV_ESC_RM_DUP_OBJECT", "hObject", 8, 4),
    ("NV_ESC_RM_SHARE", "hClient", 0, 4),
    ("NV_ESC_RM_IDLE_CHANNELS", "phClients", 0x10, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "hRoot", 0, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "hObjectParent", 4, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "function", 8, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.hMemory", 0x2c, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.Free.hMemory", 0x2c, 4),
    ("NV_ESC_RM_MAP_MEMORY", "params.hClient", 0, 4),
    ("NV_ESC_RM_MAP_MEMORY", "params.hMemory", 8, 4),
    ("NV_ESC_RM_MAP_MEMORY", "params.offset", 0x10, 8),
    ("NV_ESC_RM_MAP_MEMORY", "params.length", 0x18, 8),
    ("NV_ESC_RM_MAP_MEMORY", "params.pLinearAddress", 0x20, 8),
    ("NV_ESC_RM_MAP_MEMORY", "params.flags", 0x2c, 4),
    ("NV_ESC_RM_UNMAP_MEMORY", "hClient", 0, 4),
    ("NV_ESC_RM_UNMAP_MEMORY", "hMemory", 8, 4),
    ("NV_ESC_RM_UNMAP_MEMORY", "pLinearAddress", 0x10, 8),
    ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "hMemory", 8, 4),
    ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "pOldCpuAddress", 0x10, 8),
    ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "pNewCpuAddress", 0x18, 8),
    ("NV_ESC_SYS_PARAMS", "memblock_size", 0, 8),
    ("NV_ESC_RM_DUP_OBJECT", "hClientSrc", 0xc, 4),
    ("NV_ESC_RM_DUP_OBJECT", "hObjectSrc", 0x10, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "status", 0x14, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.type", 0x30, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.flags", 0x34, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.attr", 0x38, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.format", 0x3c, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.partitionStride", 0x48, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.size", 0x58, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.offset", 0x68, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.limit", 0x70, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSize.attr2", 0x90, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.hMemory", 0x28, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.type", 0x2c, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.flags", 0x30, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.attr", 0x34, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.attr2", 0x38, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.descriptor", 0x40, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.limit", 0x48, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocOsDesc.descriptorType", 0x50, 4),
    ("NV_ESC_RM_MAP_MEMORY", "params.hDevice", 4, 4),
    ("NV_ESC_RM_MAP_MEMORY", "params.status", 0x28, 4),
    ("NV_ESC_RM_UNMAP_MEMORY", "status", 0x18, 4),
    ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "hClient", 0, 4),
    ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "status", 0x20, 4),
    ("NV_ESC_RM_ALLOC_MEMORY", "params.hClass", 0xc, 4),
    ("NV_ESC_RM_ALLOC_MEMORY", "params.limit", 0x20, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "total", 0x18, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "free", 0x20, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.Info.size", 0x38, 8),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSizeRange.hMemory", 0x2c, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSizeRange.flags", 0x34, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSizeRange.attr", 0x38, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSizeRange.size", 0x50, 8),
    ("NV_ESC_RM_CONTROL", "hClient", 0, 4),
    ("NV_ESC_RM_CONTROL", "hObject", 4, 4),
    ("NV_ESC_RM_CONTROL", "cmd", 8, 4),
    ("NV_ESC_RM_CONTROL", "params", 0x10, 8),
    ("NV_ESC_RM_CONTROL", "paramsSize", 0x18, 4),
    ("NV_ESC_RM_CONTROL", "status", 0x1c, 4),
    ("NV_ESC_RM_ALLOC_MEMORY", "params.flags", 0x10, 4),
    ("NV_ESC_RM_MAP_MEMORY_DMA", "hClient", 0, 4),
    ("NV_ESC_RM_MAP_MEMORY_DMA", "hMemory", 0xc, 4),
    ("NV_ESC_RM_MAP_MEMORY_DMA", "flags", 0x20, 4),
    ("NV_ESC_RM_ALLOC_CONTEXT_DMA2", "hObjectParent", 0, 4),
    ("NV_ESC_RM_ALLOC_CONTEXT_DMA2", "hObjectNew", 8, 4),
    ("NV_ESC_RM_ALLOC_CONTEXT_DMA2", "flags", 0x10, 4),
    ("NV_ESC_RM_ALLOC_CONTEXT_DMA2", "hMemory", 0x18, 4),
    ("NV_ESC_RM_VID_HEAP_CONTROL", "data.AllocSizeRange.attr2", 0x88, 4),
    ("NV_ESC_CARD_INFO", "gpu_id", 0x10, 4),
];

#[test]
fn every_offset_that_the_worker_reads_is_the_same_in_every_measured_release() {
    let store = Store::embedded().unwrap();
    let mut wrong = Vec::new();
    for release in store.profiles() {
        let profile = store.load(release).unwrap();
        for (escape, field, offset, bytes) in READ {
            // A second struct of one number is listed as NAME/STRUCT.
            let variants = profile
                .escapes
                .iter()
                .filter(|(name, _)| name.split('/').next() == Some(escape))
                .map(|(_, entry)| &profile.structs[&entry.layout]);
            let found: Vec<_> = variants.map(|layout| layout.field(field)).collect();
            if found.is_empty() || found.iter().any(|found| *found != Some((offset, bytes))) {
                wrong.push(format!("{release}: {escape} {field}: {found:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What `worker/arena_calls.rs` and `worker/video.rs` read of the parameters of memory classes.
const MEMORY: [(&str, u32, u32); 10] = [
    ("owner", 0, 4),
    ("type", 4, 4),
    ("flags", 8, 4),
    ("attr", 0x18, 4),
    ("attr2", 0x1c, 4),
    ("format", 0x20, 4),
    ("size", 0x40, 8),
    ("alignment", 0x48, 8),
    ("offset", 0x50, 8),
    ("limit", 0x58, 8),
];

#[test]
fn parameters_of_memory_are_the_same_in_every_measured_release() {
    let store = Store::embedded().unwrap();
    for release in store.profiles() {
        let profile = store.load(release).unwrap();
        let layout = &profile.structs["NV_MEMORY_ALLOCATION_PARAMS"];
        for (field, offset, bytes) in MEMORY {
            assert_eq!(layout.field(field), Some((offset, bytes)), "{release}: {field}");
        }
    }
}

#[test]
fn the_list_of_memory_sizes_and_the_time_slice_are_where_they_are_rewritten() {
    let store = Store::embedded().unwrap();
    for release in store.profiles() {
        let profile = store.load(release).unwrap();
        let control = |command: u32| &profile.controls[&command];
        let list = &control(0x2080_1301).pointers;
        assert_eq!(list.iter().map(|list| (list.at, list.elem)).collect::<Vec<_>>(), [(8, 8)]);
        // FB_GET_INFO_V2: a count and whole entries.
        assert_eq!(control(0x2080_1303).size % 8, 4, "{release}");
        for slice in [0xa06c_0103, 0xa06c_0104] {
            assert_eq!(control(slice).size, 8, "{release}");
        }
    }
}
