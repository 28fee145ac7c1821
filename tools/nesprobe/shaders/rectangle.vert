#version 450

layout(push_constant) uniform Draw {
    vec4 corners; // left, top, right, bottom, in [-1, 1]
    vec4 colour;
    float depth;
} draw;

// Two triangles with a common edge. Bit n of the masks: whether vertex n lies
// right, and at the bottom.
void main() {
    float right = float((50 >> gl_VertexIndex) & 1);
    float bottom = float((44 >> gl_VertexIndex) & 1);
    vec2 place = mix(draw.corners.xy, draw.corners.zw, vec2(right, bottom));
    gl_Position = vec4(place, draw.depth, 1.0);
}
