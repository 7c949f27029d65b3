# How much memory pools take, and how much work: judged over recorded, made-up and hostile captures.
add_executable(cgp_quality quality.cc)
target_link_libraries(cgp_quality PRIVATE cgp_testing cgp_warnings)

# A core of its own, in which each basic block that runs is counted. It stands before the other one, so
# that nothing is taken of that.
get_target_property(core_sources cgp_core SOURCES)
list(TRANSFORM core_sources PREPEND ${PROJECT_SOURCE_DIR}/csrc/core/)
add_library(cgp_core_counted OBJECT ${core_sources})
target_compile_options(cgp_core_counted PRIVATE -O1 -fsanitize-coverage=trace-pc)
target_include_directories(cgp_core_counted PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
add_executable(cgp_work_growth work_growth.cc $<TARGET_OBJECTS:cgp_core_counted>)
target_link_libraries(cgp_work_growth PRIVATE cgp_driver cgp_warnings)
add_test(NAME cgp_work_growth COMMAND cgp_work_growth)

find_package(Python 3.11 COMPONENTS Interpreter QUIET)
if(NOT Python_Interpreter_FOUND)
  message(STATUS "Python 3.11 was not found: cgp_quality judges nothing, since Python reads the traces")
  return()
endif()

# The traces as text, made when what they come from has changed.
set(traces ${PROJECT_SOURCE_DIR}/tests/traces)
set(texts ${CMAKE_CURRENT_BINARY_DIR}/traces)
set(to_text ${PROJECT_SOURCE_DIR}/benchmarks/trace_to_text.py)
set(stream_programs ${PROJECT_SOURCE_DIR}/benchmarks/stream_programs.py)
set(run_python ${CMAKE_COMMAND} -E env PYTHONPATH=${PROJECT_SOURCE_DIR} ${Python_EXECUTABLE})
file(GLOB trace_files CONFIGURE_DEPENDS ${traces}/*.json.gz ${traces}/models/*.json.gz ${traces}/worst/*.json.gz ${traces}/*.py)
add_custom_command(
  OUTPUT ${texts}/made
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${texts}
  COMMAND ${run_python} ${to_text} --output ${texts}/recorded ${traces}
  COMMAND ${run_python} ${to_text} --output ${texts}/models ${traces}/models
  COMMAND ${run_python} ${to_text} --output ${texts}/worst ${traces}/worst
  COMMAND ${run_python} ${traces}/generate.py --output ${texts}/json
  COMMAND ${run_python} ${to_text} --output ${texts}/made_up ${texts}/json
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${texts}/json
  COMMAND ${run_python} ${stream_programs} --output ${texts}/streams --seeds 0 1 2 3 4
  COMMAND ${run_python} ${traces}/one_way.py --output ${texts}/one_way
  COMMAND ${CMAKE_COMMAND} -E touch ${texts}/made
  DEPENDS ${trace_files} ${to_text} ${stream_programs}
  COMMENT "Making up captures for cgp_quality"
)
add_custom_target(cgp_quality_traces ALL DEPENDS ${texts}/made)

# With the real ones, six families in which what lives between captures does not set the limit; for the others there is
# --plain: where survivors lie decides what fits between them, and the minimum knows nothing of that.
set(in_orders ${texts}/recorded)
foreach(family cnn_res decode extremes grid2d liar sawtooth)
  foreach(seed 0 1 2)
    list(APPEND in_orders ${texts}/made_up/${family}_${seed}.txt)
  endforeach()
endforeach()
add_test(NAME cgp_quality_orders COMMAND cgp_quality --orders 100 ${in_orders})
add_test(NAME cgp_quality_models COMMAND cgp_quality --held-out --orders 100 ${texts}/models)
add_test(NAME cgp_quality_warm COMMAND cgp_quality --warm --held-out --orders 50 ${texts}/models)
add_test(NAME cgp_quality_warm_made_up COMMAND cgp_quality --warm --plain ${texts}/made_up ${texts}/worst)
add_test(NAME cgp_quality_made_up COMMAND cgp_quality --plain ${texts}/made_up ${texts}/worst)
add_test(NAME cgp_quality_streams COMMAND cgp_quality --streams ${texts}/streams)
add_test(NAME cgp_quality_one_way COMMAND cgp_quality --one-way ${texts}/one_way)
# 152 captures in one pool.
add_test(NAME cgp_quality_ratchet COMMAND cgp_quality --repeat 19 ${texts}/worst/streams_ratchet.txt)
