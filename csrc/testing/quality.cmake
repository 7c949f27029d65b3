# How much memory pools take: judged over recorded, made-up and hostile captures.
add_executable(cgp_quality quality.cc)
target_link_libraries(cgp_quality PRIVATE cgp_testing cgp_warnings)

# A core of its own, see counted_core.h. It stands before the other one, so that nothing is taken of that.
get_target_property(core_sources cgp_core SOURCES)
list(TRANSFORM core_sources PREPEND ${PROJECT_SOURCE_DIR}/csrc/core/)
add_library(cgp_core_counted OBJECT EXCLUDE_FROM_ALL ${core_sources})
target_compile_options(cgp_core_counted PRIVATE -O1 -fsanitize-coverage=trace-pc)
target_compile_definitions(cgp_core_counted PRIVATE CGP_RULE_SWITCHES)
target_include_directories(cgp_core_counted PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
# cgp_quality without some of the rules, for ablate.py.
add_executable(cgp_ablation EXCLUDE_FROM_ALL quality.cc counted_core.cc $<TARGET_OBJECTS:cgp_core_counted>)
target_compile_definitions(cgp_ablation PRIVATE CGP_RULE_SWITCHES)
target_link_libraries(cgp_ablation PRIVATE cgp_testing cgp_warnings)

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
file(GLOB trace_files CONFIGURE_DEPENDS ${traces}/*.json.gz ${traces}/models/*.json.gz ${traces}/worst/*.json.gz ${traces}/worst3/*.json.gz
  ${traces}/workspace/*.json.gz ${traces}/*.py)
add_custom_command(
  OUTPUT ${texts}/made
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${texts}
  COMMAND ${run_python} ${to_text} --output ${texts}/recorded ${traces}
  COMMAND ${run_python} ${to_text} --output ${texts}/models ${traces}/models
  COMMAND ${run_python} ${to_text} --output ${texts}/worst ${traces}/worst
  COMMAND ${run_python} ${to_text} --output ${texts}/worst3 ${traces}/worst3
  COMMAND ${run_python} ${to_text} --output ${texts}/workspace ${traces}/workspace
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

function(add_quality_test name)
  add_test(NAME cgp_quality_${name} COMMAND cgp_quality ${ARGN})
endfunction()

# Which bound each family is judged by: --training and --hostile have their own.
set(programs cnn cnn_res decode diffusion grid2d keepall latefree mixed moe prefill twomodels)
set(training train_keep train_seq training)
set(hostile alternate comb edge extremes liar manygraphs pinned rnd sawtooth tiny)
foreach(kind programs training hostile)
  set(${kind}_texts)
  foreach(family ${${kind}})
    foreach(seed RANGE 19)
      list(APPEND ${kind}_texts ${texts}/made_up/${family}_${seed}.txt)
    endforeach()
  endforeach()
endforeach()

add_quality_test(orders --orders 100 ${texts}/recorded)
add_quality_test(models --orders 100 ${texts}/models)
add_quality_test(warm --warm --orders 50 ${texts}/recorded ${texts}/models)
add_quality_test(programs ${programs_texts})
add_quality_test(warm_programs --warm ${programs_texts})
add_quality_test(training --training ${training_texts})
add_quality_test(hostile --hostile ${hostile_texts} ${texts}/worst/mixed_x27.txt ${texts}/worst/moe_x16.txt
  ${texts}/worst/sawtooth_61556524.txt ${texts}/worst/sawtooth_700039008.txt ${texts}/worst/unforeseen_400B.txt ${texts}/worst3)
add_quality_test(workspace --orders 10 ${texts}/workspace)
add_quality_test(streams --streams ${texts}/streams ${texts}/worst/streams_ratchet.txt)
add_quality_test(one_way --one-way ${texts}/one_way)
# Captured again and again in one pool.
add_quality_test(again --repeat 24 ${texts}/recorded ${texts}/models ${texts}/worst ${texts}/worst3 ${texts}/workspace)
# Of seven seeds, since twenty take two minutes. A program of very many graphs goes on mapping, less than 2 % of the first
# time's: docs/limits.md.
set(again_texts ${programs_texts} ${training_texts} ${hostile_texts})
list(FILTER again_texts INCLUDE REGEX "_[0-6]\\.txt$")
list(REMOVE_ITEM again_texts ${texts}/made_up/manygraphs_3.txt)
add_quality_test(programs_again --held --repeat 24 ${again_texts})
add_quality_test(streams_again --streams --repeat 24 ${texts}/streams)
add_quality_test(one_way_again --one-way --repeat 24 ${texts}/one_way)
