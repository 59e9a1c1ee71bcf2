# The build of every kestrel family with CUDA C++ kernels.
#
#   include(KestrelFamily)
#   kestrel_family(kestrel_norm SOURCES csrc/layer_norm.cu FUNCTIONS layer_norm)
#
# compiles SOURCES into kestrel_norm/_lib/kestrel_norm.so, which runs on every architecture and exports each of FUNCTIONS
# as the tvm-ffi symbol __tvm_ffi_<function>, and writes kestrel_norm/_lib/manifest.json, which says what the binary runs
# on and holds. With CUTE, the family has CuTe kernels too: tools/cute_build compiles them into one object of the same
# library, and the manifest names their entry points. Without SOURCES only the manifest is installed. Before it,
# kestrel_hopper_only(csrc/experts_tma.cu) names those of SOURCES whose kernels the family launches on sm_90a alone.
#
# GPUs of sm_86 and sm_89 run machine code of sm_80. In a build for sm_80 too, they share it but for sources that
# compile to something else there, which DISTINCT_86 and DISTINCT_89 name: on sm_89, those that convert FP8. Others see
# KESTREL_SHARED_86 and KESTREL_SHARED_89, with which such code does not compile (kestrel/fp8.cuh).
#
# nvcc comes from PyPI (cuda-toolkit in build-system.requires), never from the system. The environment variable
# KESTREL_ARCHS, a list such as "90a" or "80;90a", narrows the architectures. With KESTREL_ARCHS=none the override in
# pyproject.toml builds a wheel without kernels, and CMake does not run. CI rebuilds parts of families: KESTREL_SOURCES, a
# regular expression, leaves other sources out, and KESTREL_VARIANTS other CuTe kernels.
#
# Wheels must be byte-identical on rebuild, so nothing may bake in a path, a process id or a time:
# - __FILE__ in headers expands to the path of the checkout or of pip's temporary environment: every root is mapped to ".";
# - a build-tree RPATH leaves its padding in the installed file: no RPATH is ever written;
# - nvcc puts its process id into the name of a kernel in an anonymous namespace: the sources use named namespaces.

include_guard(GLOBAL)

set(KESTREL_ALL_ARCHS 80 86 89 90a 100f 120f) # those of ci/matrix.json, which no sdist holds
get_filename_component(KESTREL_TOOLS_DIR "${CMAKE_CURRENT_LIST_DIR}/.." REALPATH)

# The architectures of this build: KESTREL_ARCHS from the environment, or all.
function(_kestrel_archs result)
  set(archs ${KESTREL_ALL_ARCHS})
  if(NOT "$ENV{KESTREL_ARCHS}" STREQUAL "")
    string(REGEX MATCHALL "[^;, ]+" archs "$ENV{KESTREL_ARCHS}")
    list(REMOVE_DUPLICATES archs)
  endif()
  foreach(arch IN LISTS archs)
    if(NOT arch IN_LIST KESTREL_ALL_ARCHS)
      message(FATAL_ERROR "KESTREL_ARCHS: expected architectures from ${KESTREL_ALL_ARCHS}, got ${arch}")
    endif()
  endforeach()
  set(${result} ${archs} PARENT_SCOPE)
endfunction()

# The folder of the CUDA compiler that pip put beside this Python (site-packages/nvidia/cu13).
function(_kestrel_find_cuda result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
roots = [pathlib.Path(p, "cu13") for p in (spec.submodule_search_locations if spec else ())]
print(next((r.resolve() for r in roots if (r / "bin" / "nvcc").exists()), ""), end="")
]]
    OUTPUT_VARIABLE root COMMAND_ERROR_IS_FATAL ANY)
  if(root STREQUAL "")
    message(FATAL_ERROR "nvcc was not found beside ${Python_EXECUTABLE}: install "
                        "the cuda-toolkit of this package's build requirements (pyproject.toml)")
  endif()
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

# {"family": ..., "archs": [...], "functions": [...], "cute": false}
function(_kestrel_write_manifest family archs functions cute)
  set(json_lists "")
  foreach(items IN ITEMS "${archs}" "${functions}")
    list(TRANSFORM items REPLACE "(.+)" "\"\\1\"")
    list(JOIN items ", " joined)
    list(APPEND json_lists "[${joined}]")
  endforeach()
  list(GET json_lists 0 json_archs)
  list(GET json_lists 1 json_functions)
  set(manifest "${CMAKE_CURRENT_BINARY_DIR}/manifest.json")
  file(WRITE "${manifest}"
    "{\"family\": \"${family}\", \"archs\": ${json_archs}, \"functions\": ${json_functions}, \"cute\": ${cute}}\n")
  install(FILES "${manifest}" DESTINATION "${family}/_lib")
endfunction()

function(_kestrel_add_library family archs cuda_root)
  set(sources ${ARGN})
  add_library(${family} SHARED ${sources})
  set_target_properties(${family} PROPERTIES
    PREFIX "" CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_ARCHITECTURES OFF CUDA_VISIBILITY_PRESET hidden
    SKIP_BUILD_RPATH ON POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${family} PRIVATE "${KESTREL_TOOLS_DIR}/include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_link_libraries(${family} PRIVATE tvm_ffi::shared)

  # SASS only, no PTX: a GPU that is not listed falls back to the reference. (CUDA_ARCHITECTURES of older CMake
  # releases does not know the family forms 100f and 120f.)
  foreach(source IN LISTS sources)
    set(compiled_for ${archs})
    if(source IN_LIST _KESTREL_HOPPER_ONLY AND 90a IN_LIST archs)
      set(compiled_for 90a)
    endif()
    set(options "")
    foreach(arch IN ITEMS 86 89)
      if(NOT source IN_LIST _KESTREL_DISTINCT_${arch})
        if(NOT source IN_LIST _KESTREL_HOPPER_ONLY)
          list(APPEND options -DKESTREL_SHARED_${arch})
        endif()
        if(80 IN_LIST compiled_for)
          list(REMOVE_ITEM compiled_for ${arch})
        endif()
      endif()
    endforeach()
    foreach(arch IN LISTS compiled_for)
      list(APPEND options "-gencode=arch=compute_${arch},code=sm_${arch}")
    endforeach()
    set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${options}")
  endforeach()
  target_compile_options(${family} PRIVATE --threads=0 -Xptxas=-warn-spills)
  # Release wheels carry the library as xz, which is three times smaller when nvcc has not compressed the code.
  list(LENGTH archs count)
  if(count EQUAL 1)
    target_compile_options(${family} PRIVATE -Xfatbin=-compress-all -Xfatbin=-compress-mode=size)
  else()
    target_compile_options(${family} PRIVATE -Xfatbin=-compress-mode=none)
  endif()
  # `site` holds the headers of tvm-ffi. GCC takes the last map that matches a file, so the widest comes first.
  get_filename_component(site "${tvm_ffi_INCLUDE_DIR}/../.." REALPATH)
  foreach(root IN ITEMS "${site}" "${cuda_root}" "${KESTREL_TOOLS_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}" "${CMAKE_CURRENT_BINARY_DIR}")
    target_compile_options(${family} PRIVATE "-Xcompiler=-ffile-prefix-map=${root}=.")
  endforeach()
  target_link_options(${family} PRIVATE -Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,--no-undefined)
  install(TARGETS ${family} LIBRARY DESTINATION "${family}/_lib")
endfunction()

# Adds the CuTe kernels of packages/<family> to its library and their entry points to the variable `functions`.
function(_kestrel_add_cute family functions)
  set(tool "${Python_EXECUTABLE}" "${KESTREL_TOOLS_DIR}/cute_build" "${CMAKE_CURRENT_SOURCE_DIR}")
  set(object "${CMAKE_CURRENT_BINARY_DIR}/cute_kernels.o")
  execute_process(COMMAND ${tool} "${object}" --describe
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(POP_FRONT found runtime)
  file(GLOB kernels CONFIGURE_DEPENDS
    "${CMAKE_CURRENT_SOURCE_DIR}/src/${family}/kernels/*.py"
    "${KESTREL_TOOLS_DIR}/cute_build/*.py"
    "${KESTREL_TOOLS_DIR}/kestrel_runtime/cute_dsl/*.py" # in an sdist
    "${KESTREL_TOOLS_DIR}/../packages/runtime/src/kestrel_runtime/cute_dsl/*.py")
  add_custom_command(OUTPUT "${object}" COMMAND ${tool} "${object}" --object DEPENDS ${kernels} VERBATIM)
  set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  target_sources(${family} PRIVATE "${object}")
  target_link_libraries(${family} PRIVATE "${runtime}")
  set(${functions} ${${functions}} ${found} PARENT_SCOPE)
endfunction()

# No other source may instantiate the same kernel template: CUDA would find one of the two at random on another GPU.
macro(kestrel_hopper_only)
  set(_KESTREL_HOPPER_ONLY ${ARGN})
endmacro()

# A macro, because enable_language must run in the caller's directory scope.
macro(kestrel_family family)
  cmake_parse_arguments(_KESTREL "CUTE" "" "SOURCES;FUNCTIONS;DISTINCT_86;DISTINCT_89" ${ARGN})
  set(_KESTREL_ARCHS "")
  if(NOT "$ENV{KESTREL_SOURCES}" STREQUAL "")
    list(FILTER _KESTREL_SOURCES INCLUDE REGEX "$ENV{KESTREL_SOURCES}")
  endif()
  if(_KESTREL_SOURCES)
    find_package(Python COMPONENTS Interpreter REQUIRED)
    _kestrel_archs(_KESTREL_ARCHS)
    _kestrel_find_cuda(_KESTREL_CUDA)
    set(CMAKE_CUDA_COMPILER "${_KESTREL_CUDA}/bin/nvcc")
    set(CMAKE_CUDA_FLAGS_INIT "-L${_KESTREL_CUDA}/lib") # the wheels say lib, nvcc.profile lib64
    set(CMAKE_CUDA_FLAGS_RELEASE "-O2 -DNDEBUG") # host code: a sixth smaller than at -O3, as fast; device code stays at -O3
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # before find_package(tvm_ffi), which would choose Shared
    enable_language(CXX)
    enable_language(CUDA)
    execute_process(COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config --cmakedir
                    OUTPUT_VARIABLE tvm_ffi_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    find_package(tvm_ffi CONFIG REQUIRED)
    _kestrel_add_library(${family} "${_KESTREL_ARCHS}" "${_KESTREL_CUDA}" ${_KESTREL_SOURCES})
  endif()
  set(_KESTREL_HAS_CUTE false)
  if(_KESTREL_CUTE)
    _kestrel_add_cute(${family} _KESTREL_FUNCTIONS)
    set(_KESTREL_HAS_CUTE true)
  endif()
  _kestrel_write_manifest(${family} "${_KESTREL_ARCHS}" "${_KESTREL_FUNCTIONS}" ${_KESTREL_HAS_CUTE})
  # `kestrel-kernels bench` finds them in the wheel.
  install(DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/benchmarks" DESTINATION "${family}" OPTIONAL
          FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE)
endmacro()
